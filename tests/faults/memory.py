"""How much memory a process has had, asked in that process."""

#: For the beginning of a script: ``peak()`` is the most MiB that it has had so far. What `resource.getrusage` says counts the
#: memory of the process that started it too, and so hides what is less than that.
PEAK = """
def peak():
    with open("/proc/self/status") as status:
        return int(status.read().partition("VmHWM:")[2].split()[0]) >> 10
"""
