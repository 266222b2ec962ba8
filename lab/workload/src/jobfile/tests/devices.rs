//! Options of zones, priorities, NUMA nodes and groups.

use super::*;

#[test]
fn priorities_of_single_ios_and_nodes_have_fios_meaning() {
    let text = "[global]\nfilename=x\nioengine=libaio\nprioclass=3\n\
                [one]\nrw=randread\ncmdprio_percentage=20\nlog_prio=1\n\
                [two]\nrw=randrw\nbssplit=64k/40:1024k/60,1024k/100\n\
                cmdprio_bssplit=64k/25/1/1:64k/75/3/2:1024k/0,1024k/10\ncmdprio_class=2\ncmdprio=,5\n\
                [three]\nrw=write\nprio=7\ncmdprio_percentage=10,0\n\
                numa_cpu_nodes=0-1,3\nnuma_mem_policy=interleave:all\n";
    let plan = parse_file(text).unwrap();
    let shares = |job: usize| {
        let list = plan.jobs[job].spec.command_priorities.shares.clone();
        list.map(|shares| -> Vec<_> {
            shares
                .iter()
                .map(|one| (one.block_bytes, one.percent, one.priority >> 13, one.priority & 7))
                .collect()
        })
    };
    assert_eq!(shares(0), [vec![(None, 20, 1, 0)], vec![]], "real time by default");
    assert_eq!(
        shares(1),
        [vec![(Some(65_536), 25, 1, 1), (Some(65_536), 75, 3, 2)], vec![(Some(1 << 20), 10, 2, 5)]]
    );
    assert_eq!(shares(2), [vec![], vec![]], "the job does not read");
    let hint = parse_file("[a]\nfilename=x\nioengine=libaio\ncmdprio_bssplit=1m/10/2/0/5\n").unwrap();
    assert_eq!(hint.jobs[0].spec.command_priorities.shares[0][0].priority, 2 << 13 | 5 << 3);
    let priorities: Vec<u16> = plan.jobs.iter().map(|job| job.spec.priority).collect();
    assert_eq!(priorities, [3 << 13, 3 << 13, 3 << 13 | 7]);
    assert!(plan.jobs[0].spec.log.priority_values && !plan.jobs[1].spec.log.priority_values);
    assert_eq!(plan.jobs[2].numa_cpu_nodes.as_deref(), Some([0, 1, 3].as_slice()));
    assert_eq!(plan.jobs[2].memory_policy, Some(os::MemoryPolicy::Interleave(vec![])));
    for (options, reason) in [
        ("cmdprio_percentage=5", "does nothing with ioengine=psync; it needs libaio or io_uring"),
        ("ioengine=libaio\ncmdprio_percentage=5\ncmdprio_bssplit=4k/1", "exclude each other"),
        ("ioengine=libaio\ncmdprio_bssplit=4k/60:4k/50/1/1", "4096 bytes add up to 110"),
        ("ioengine=libaio\ncmdprio_bssplit=4k/60/1", "SIZE/PERCENT/CLASS/PRIO"),
        ("ioengine=libaio\ncmdprio_bssplit=4k/60/1/0/1024", "between 0 and 1023"),
        ("ioengine=libaio\ncmdprio_class=4", "between 0 and 3"),
        ("ioengine=libaio\ncmdprio=1", "do nothing without --cmdprio_percentage"),
        ("numa_mem_policy=prefer:0-1", "prefer has one node"),
        ("numa_mem_policy=bind", "bind needs nodes"),
        ("numa_mem_policy=local:0", "local has no nodes"),
        ("numa_mem_policy=near:0", "default, local, prefer"),
        ("numa_cpu_nodes=2-1", "a list of nodes"),
        ("numa_cpu_nodes=0\ncpus_allowed=0", "exclude each other"),
        ("ioengine=bdev\nnuma_mem_policy=local", "--numa_mem_policy is for the kernel's engines"),
    ] {
        let error = parse_file(&format!("[a]\nfilename=x\n{options}\n")).unwrap_err();
        assert!(error.to_string().contains(reason), "{options}: {error}");
    }
}

#[test]
fn the_jobs_of_a_reporting_group_have_one_steady_state() {
    let text = "[global]\nfilename=x\ngroup_reporting\nnumjobs=4\nss=iops:10%\nss_dur=30s\n[a]\n[b]\n";
    let plan = parse_file(text).unwrap();
    assert!(plan.jobs.iter().all(|job| job.spec.steady.unwrap().of_group));
    let error = parse_file(&format!("{text}ss_dur=20s\n")).unwrap_err().to_string();
    assert!(error.contains("b: the options of steadystate are the same for all jobs"), "{error}");
    // Another group has its own.
    assert!(parse_file(&format!("{text}ss_dur=20s\nnew_group\n")).is_ok());
}

#[test]
fn zoned_devices_have_fios_options() {
    let text = "[global]\nfilename=/dev/sdb\nzonemode=zbd\nzonesize=256m\noffset=524z\ntime_based\nruntime=30\n\
                [one]\nrw=randwrite\nbs=32m\nsize=8z\nzone_reset_threshold=0.7\nzone_reset_frequency=0.125\n\
                [two]\nrw=randtrim\nbs=256m\nsize=128z\nflow=1\nmax_open_zones=32\njob_max_open_zones=4\n\
                [three]\nrw=read\nread_beyond_wp=1\nignore_zone_limits=1\nzonesize=0\nio_size=3z\n";
    let plan = parse_file(text).unwrap();
    let [one, two, three] = plan.jobs.as_slice() else { panic!("{} jobs", plan.jobs.len()) };
    let zoned = |job: &PerfJob| job.spec.zoned.as_deref().unwrap().clone();
    assert_eq!((one.spec.offset_bytes, one.spec.size_bytes), (524 << 28, Some(8 << 28)));
    assert_eq!((zoned(one).reset_threshold, zoned(one).reset_frequency), (0.7, 0.125));
    assert_eq!((zoned(one).zone_bytes, one.spec.random_map), (Some(256 << 20), false));
    assert_eq!((zoned(two).open_max, zoned(two).job_open_max, two.spec.block_bytes), (32, 4, 256 << 20));
    // The device says how large its zones are.
    assert_eq!((zoned(three).zone_bytes, three.spec.in_zones.offset), (None, Some(524)));
    assert!(zoned(three).reads_beyond_pointer && zoned(three).ignores_limit);
    let mut resolved = three.spec.clone();
    resolved.resolve_zones(1 << 20).unwrap();
    assert_eq!((resolved.offset_bytes, resolved.io_bytes), (524 << 20, Some(3 << 20)));
    for (options, reason) in [
        ("max_open_zones=2", "do nothing without --zonemode=zbd"),
        ("zonemode=zbd\nverify=md5\nrw=write", "excludes --verify"),
        ("zonemode=zbd\nzoneskip=1m", "excludes --zoneskip"),
        ("zonemode=zbd\nzonesize=1m\nbs=2m", "above --zonesize"),
        ("zonemode=zbd\nioengine=falloc\nrw=write", "zonemode=zbd does nothing with ioengine=falloc"),
        ("zonemode=zbd\nioengine=bdev", "--zonemode=zbd is for the kernel's engines"),
        ("zonemode=zbd\nzone_reset_frequency=2", "between 0 and 1"),
        ("size=8z", "a size in zones, as 8z, needs --zonesize"),
        ("size=0z\nzonesize=1m", "nothing is used"),
        ("bs=2m\nverify=md5\nrw=write", "verify has blocks of at most 1 MiB"),
        ("bs=2m\nioengine=bdev", "this engine has blocks of at most 1 MiB"),
        ("bs=512m", "above 256 MiB"),
    ] {
        let error = parse_file(&format!("[a]\nfilename=x\n{options}\n")).unwrap_err();
        assert!(error.to_string().contains(reason), "{options}: {error}");
    }
    assert!(parse_file("[a]\nfilename=x\nrw=randtrim\nbs=512m\n").is_ok(), "trims have no buffers");
}

#[test]
fn engines_of_fio_that_are_refused_say_why() {
    for (engine, why) in [
        ("rbd", "a library of another project"),
        ("net", "sockets, not storage"),
        ("libzbc", "have zonemode=zbd"),
        ("sg", "beside the block layer"),
    ] {
        let error = parse_file(&format!("[a]\nfilename=x\nioengine={engine}\n")).unwrap_err().to_string();
        assert!(error.contains(&format!("--ioengine={engine}: the engine is not supported: ")), "{error}");
        assert!(error.contains(why), "{error}");
    }
    let error = parse_file("[a]\nfilename=x\nioengine=aoi\n").unwrap_err().to_string();
    assert!(error.contains("it is one of null, psync"), "{error}");
}

#[test]
fn a_time_based_job_connects_to_a_lost_target_again() {
    let reconnects_ns = |options: &str| {
        let text = format!("[a]\nfilename=nvme+tcp\\://h/nqn.2016-06.io.spdk\\:a\nioengine=bdev\n{options}");
        parse_file(&text).unwrap().jobs[0].spec.reconnects_for_ns()
    };
    assert_eq!(reconnects_ns(""), 0);
    assert_eq!(reconnects_ns("runtime=5s\n"), 0);
    assert_eq!(reconnects_ns("runtime=5s\ntime_based\n"), u64::MAX);
    assert_eq!(reconnects_ns("reconnect=30s\n"), 30_000_000_000);
    assert_eq!(reconnects_ns("runtime=5s\ntime_based\nreconnect=0\n"), 0);
}
