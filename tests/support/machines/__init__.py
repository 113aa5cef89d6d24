"""Machines: several that look real, on one Linux machine, for tests of faults between them. Root only.

    with Machines(3) as (m1, m2, m3):
        server = m1.popen([sys.executable, "serve.py"])
        m2.run(["ping", "-c", "1", "m1"])
        m1.cut_link()       # what is sent is lost without a word
        m1.mend_link()
        m1.cut_power()      # the others see no FIN and no RST; all its processes are gone
        m1.power_on()       # the same name and address, and nothing else of before

    test process ── keeper (in the network namespace of the switches)
                      ├── init of m1 (namespaces of its own: network, mount, PID, UTS, IPC) ── what runs on m1
                      └── init of m2 ...

A machine's root is the host's, read-only; /tmp, /var/tmp, /dev/shm, /run and all homes are its own and empty. What the
tests need below one of these (the repository, the interpreter) is seen there, read-only.

No namespace has a name and the host's own network has no part in it, so all of it is gone when its processes are. The
keeper ends when the test process ends, however that comes about, and each init ends when the keeper does.

What machines share is the kernel: its clock, its memory, and root's power over both.
"""
