"""Slurm for tests: a real one, whose nodes are machines of the harness and can lose power. Root only.

    with Machines(5) as machines, Slurm(machines, tmp_path) as slurm:     # m1 controls, m2 to m5 compute
        job = slurm.submit("srun --no-kill -W0 sleep 1000", "-N3", "--no-kill", user=USER)
        job.wait("RUNNING")
        slurm.cut_power(job.nodes()[0])   # the batch node
        slurm.power_on("m2")              # its slurmd too

At the end of the block all daemons end, and all that runs in jobs.

Each machine has a munged with the key of this cluster alone, and the same /etc/slurm. The controller computes nothing,
so each node can be lost. Commands run on a machine, as root, who administers Slurm, or as an ordinary user.

What the daemons say is kept in the folder of the test: it outlives their machines.
"""
