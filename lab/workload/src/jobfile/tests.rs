//! Valid and invalid job files and command lines.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::{
    ArrivalProcess, BlockSizes, BufferContent, Distribution, FileService, FioVerify, FlowOptions,
    StridedZones, Verify, Workload,
};

mod devices;

/// Job files and environment variables of a test.
#[derive(Default)]
pub(crate) struct TestFiles {
    files: BTreeMap<&'static str, String>,
    variables: BTreeMap<&'static str, &'static str>,
}

impl Lookup for TestFiles {
    fn file(&self, path: &str) -> Result<String, String> {
        self.files.get(path).cloned().ok_or_else(|| format!("{path}: no such file"))
    }

    fn variable(&self, name: &str) -> Option<String> {
        self.variables.get(name).map(|value| (*value).to_string())
    }

    fn keyword(&self, name: &str) -> Option<u64> {
        (name == "$ncpus").then_some(6)
    }
}

fn test_files(text: &str) -> TestFiles {
    TestFiles { files: BTreeMap::from([("a.fio", text.to_string())]), ..TestFiles::default() }
}

pub(crate) fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_string).collect()
}

fn parse_file(text: &str) -> Result<JobPlan, JobPlanError> {
    plan(&words("a.fio"), &test_files(text))
}

/// Two jobs with most kinds of option values.
const MIXED: &str = "; two tenants\n\
    [global]\nioengine=io_uring\ndirect=1\nfilename=/dev/nvme0n1:/dev/nvme1n1\nruntime=30s\ntime_based\n\
    ramp_time=1m\nsize=100%\nnorandommap\n\n\
    [reader]\nrw=randread\nbs=4k\niodepth=1\ncpus_allowed=1-2,5\ncpus_allowed_policy=split\n\
    registerfiles=1\nfixedbufs\n\n\
    [writer]\n# behind the reader\nrw=randrw\nrwmixread=30\nbssplit=4k/60:64k/40,8k\niodepth=128\nnumjobs=4\n\
    stonewall\nrandom_distribution=zipf:1.2\nrate_iops=,500\nrate_process=poisson\nfile_service_type=random:3\n";

#[test]
fn values_in_parentheses_are_computed() {
    let text = "[a]\nfilename=/dev/nvme0n1\nioengine=libaio\nrw=randread\nbssplit=(2k*2)/(100-40):64k/40\niodepth=($ncpus*2)\nruntime=(1m/2)\n\
        thinktime=(2*10)\nrandom_distribution=zipf:(1+1/5.0)\npercentile_list=(100-1):99.9\nsize=(1g-512m)\n\
        [b]\nfilename=/dev/nvme0n1\nbsrange=(8k-4k)-(64k)\nnumjobs=(2*8)\n";
    let plan = parse_file(text).unwrap();
    let spec = &plan.jobs[0].spec;
    let sizes = Some(BlockSizes::Split(vec![(4096, 6000), (65536, 4000)]));
    assert_eq!(
        (spec.io_depth, spec.runtime_ns, spec.size_bytes),
        (12, Some(30_000_000_000), Some(512 << 20))
    );
    assert_eq!((plan.jobs[0].sizes[0].clone(), spec.think.ns), (sizes, 20_000));
    assert_eq!(spec.distribution, Distribution::Zipf { theta: 1.2 });
    assert_eq!(plan.jobs[1].sizes[0], Some(BlockSizes::Range { min: 4096, max: 65536 }));
    assert_eq!(plan.jobs[1].numjobs, 16);
    for (option, message) in [
        ("iodepth=2*8", "values are computed in parentheses: (2*8)"),
        ("bs=2^12", "values are computed in parentheses: (2^12)"),
        ("size=(4k", "the expression is not complete"),
        ("size=(4-8)", "-4 is negative"),
        ("iodepth=(1-1)", "it is between 1 and 65536"),
        ("runtime=(9223372036854775807*1h)", "it is too large"),
        ("thinktime=(9223372036854775807)", "it is too long"),
    ] {
        let error = parse_file(&format!("[a]\nfilename=x\n{option}\n")).unwrap_err().to_string();
        assert!(error.contains(message), "{option}: {error}");
    }
}

#[test]
fn sections_inherit_the_global_options() {
    let plan = parse_file(MIXED).unwrap();
    let [reader, writer] = plan.jobs.as_slice() else { panic!("{:?}", plan.jobs.len()) };
    assert_eq!((reader.spec.name.as_str(), writer.spec.name.as_str()), ("reader", "writer"));
    assert_eq!((reader.spec.workload, reader.spec.io_depth), (Workload::RandRead, 1));
    assert_eq!(reader.filenames, ["/dev/nvme0n1", "/dev/nvme1n1"]);
    assert!(reader.direct && reader.spec.time_based && !reader.spec.random_map && reader.cpus_split);
    assert_eq!(reader.cpus.as_deref(), Some([1, 2, 5].as_slice()));
    assert_eq!((reader.spec.runtime_ns, reader.spec.ramp_ns), (Some(30_000_000_000), 60_000_000_000));
    assert!(reader.engine_config.register_files && reader.engine_config.fixed_buffers);
    assert_eq!(reader.engine, Some(EngineName::Kernel(io_engines::EngineKind::Uring)));
    assert_eq!((writer.numjobs, writer.stonewall, writer.spec.read_percent), (4, true, 30));
    let sizes = writer.spec.sizes.as_deref().unwrap();
    assert_eq!(sizes[0], BlockSizes::Split(vec![(4096, 6000), (65_536, 4000)]));
    assert_eq!((&sizes[1], writer.spec.block_bytes), (&BlockSizes::Split(vec![(8192, 10_000)]), 65_536));
    assert_eq!(writer.spec.distribution, Distribution::Zipf { theta: 1.2 });
    assert_eq!(writer.spec.rates.iops, [None, Some(500), Some(500)]);
    assert_eq!(
        (writer.spec.rates.process, writer.spec.file_service),
        (ArrivalProcess::Poisson, FileService::Random(3))
    );
    let global: Vec<&str> = plan.globals.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(global[..3], ["ioengine", "direct", "filename"]);
    assert_eq!(reader.options[0], ("rw".to_string(), "randread".to_string()));
}

#[test]
fn errors_name_the_option_the_file_and_the_line() {
    let cases = [
        ("[a]\nbloksize=4k\n", "a.fio:2: bloksize is no option; did you mean blocksize?"),
        ("[a]\nrw=up\n", "a.fio:2: --rw=up: it is one of read, write"),
        ("[a]\n\nread_iolog=x\n", "a.fio:3: read_iolog is not supported: replay"),
        ("[a\n", "a.fio:1: [a begins a section"),
        ("[a]\nbs\n", "a.fio:2: bs needs a value: bs=4k"),
        ("[a]\nbssplit=4k/60:8k/60\n", "add up to 120"),
        ("[a]\nrandom_distribution=zoned:60/10\n", "adds up to 60 %"),
        ("[a]\noutput=x\n", "belongs on the command line"),
        ("[a]\nfilename=${NOWHERE}\n", "no variable NOWHERE"),
        ("[a]\ninclude b.fio\n", "a.fio:2: b.fio: no such file"),
        ("[a]\nioengine=psync\nfixedbufs=1\nfilename=x\n", "--fixedbufs does nothing with ioengine=psync"),
        ("[a]\nioengine=io_uring\nhipri\nfilename=x\n", "add --direct=1"),
        ("[a]\nioengine=libaio\nfilename=null:1g\n", "takes files, not null:1g"),
        ("[a]\nfilename=null:1g\nsqthread_poll\n", "--sqthread_poll is for the kernel's engines"),
        ("[a]\nfilename=x\ntime_based\n", "needs --runtime"),
        ("[a]\niodepth=0\n", "between 1 and 65536"),
    ];
    for (text, message) in cases {
        let error = parse_file(text).err().unwrap_or_else(|| panic!("{text} is accepted")).to_string();
        assert!(error.contains(message), "{text}: {error}");
    }
}

#[test]
fn a_file_that_includes_itself_is_rejected() {
    let error = parse_file("include a.fio\n").unwrap_err().to_string();
    assert!(error.contains("more than 16 deep"), "{error}");
}

#[test]
fn includes_and_variables_are_expanded() {
    let mut test_files = test_files("[global]\ninclude sub/common.inc\n[a]\nfilename=${DEV}\nbs=${SIZE}k\n");
    test_files.files.insert("sub/common.inc", "ioengine=libaio\niodepth=8\n".to_string());
    test_files.variables = BTreeMap::from([("DEV", "/dev/sda"), ("SIZE", "16")]);
    let plan = plan(&words("a.fio"), &test_files).unwrap();
    let job = &plan.jobs[0];
    assert_eq!((job.filenames[0].as_str(), job.spec.block_bytes, job.spec.io_depth), ("/dev/sda", 16_384, 8));
}

#[test]
fn numbers_of_the_machine_are_replaced_in_job_files() {
    let plan = parse_file("[a]\nfilename=x\nnumjobs=$ncpus\n[b]\nfilename=y\nsize=$ncpusm\n").unwrap();
    assert_eq!((plan.jobs[0].numjobs, plan.jobs[1].spec.size_bytes), (6, Some(6 << 20)));
    let error = parse_file("[a]\nnumjobs=$cpus\n").unwrap_err().to_string();
    assert!(error.contains("a.fio:2: --numjobs=$cpus"), "{error}");
}

#[test]
fn an_io_on_an_operation_has_its_size_unless_there_is_a_block_size() {
    let job = |line: &str| plan(&words(line), &TestFiles::default()).unwrap().jobs.remove(0);
    for (line, name, bytes) in [
        ("--filename=accel:copy?size=64k --rw=read", "accel:copy?size=64k", 65_536),
        ("--filename=accel\\:xor?size=8k --rw=write", "accel:xor?size=8k", 8192),
        ("--filename=accel:copy?size=8k --bs=64k --rw=read", "accel:copy?size=8k", 65_536),
        ("--filename=accel:crc32c --rw=read", "accel:crc32c", 4096),
    ] {
        let job = job(line);
        assert_eq!((job.spec.block_bytes, job.filenames), (bytes, vec![name.to_string()]), "{line}");
        assert_eq!(job.engine, Some(EngineName::Bdev));
    }
}

#[test]
fn options_have_one_dash_or_two() {
    let parse = |line: &str| plan(&words(line), &TestFiles::default());
    let long = parse("--filename=x --direct=1 --iodepth=8 --thread --ioengine=libaio --rw=randread --name=a")
        .unwrap();
    let short =
        parse("-filename=x -direct 1 -iodepth 8 -thread -ioengine=libaio -rw=randread -name=a").unwrap();
    assert_eq!(format!("{:?}", short.jobs), format!("{:?}", long.jobs));
    let buffered = parse("-filename x -direct 0 -rw=randread").unwrap();
    assert!(!buffered.jobs[0].direct);
    // A value may begin with a dash; an option is none.
    assert_eq!(parse("--filename -x --rw=read").unwrap().jobs[0].filenames, ["-x"]);
    for (line, message) in [
        ("-filename -rw=read", "--filename needs a value"),
        ("-bloksize=4k", "bloksize is no option; did you mean blocksize?"),
    ] {
        let error = parse(line).unwrap_err().to_string();
        assert!(error.contains(message), "{line}: {error}");
    }
}

#[test]
fn a_command_line_is_one_job_until_the_second_name() {
    let parse = |line: &str| plan(&words(line), &TestFiles::default()).unwrap();
    let one =
        parse("--filename=x --rw randread --bs=8k --name=a --verify --time_based --runtime 5 --eta=never");
    assert_eq!((one.jobs.len(), one.jobs[0].spec.name.as_str()), (1, "a"));
    assert_eq!(
        (one.jobs[0].spec.block_bytes, one.jobs[0].spec.verify),
        (8192, Verify::Fio(FioVerify::Crc32c))
    );
    assert_eq!(one.run_option("eta"), Some("never"));
    let two = parse("--name=a --filename=x --bs=8k --name=b --filename=y --output-format=json");
    let names: Vec<&str> = two.jobs.iter().map(|job| job.spec.name.as_str()).collect();
    assert_eq!((names, two.jobs[1].spec.block_bytes), (vec!["a", "b"], 4096));
    assert_eq!(two.run_option("output_format"), Some("json"));
    assert!(parse("").jobs.is_empty());
}

#[test]
fn options_before_a_job_file_are_global_and_section_selects_jobs() {
    let test_files = test_files("[a]\nfilename=x\n[b]\nfilename=y\nbs=16k\n");
    let plan = plan(&words("--bs=8k --section=b a.fio"), &test_files).unwrap();
    assert_eq!((plan.jobs.len(), plan.jobs[0].spec.block_bytes), (1, 16_384));
    let error = super::plan(&words("--section=c a.fio"), &test_files).unwrap_err().to_string();
    assert!(error.contains("--section=c"), "{error}");
}

#[test]
fn the_job_global_of_the_command_line_is_the_global_section() {
    let line = "--name=global --bs=8k --size=1m --name=a --name=b --bs=4k --name=global --size=2m --name=c";
    let jobs = plan(&words(line), &TestFiles::default()).unwrap().jobs;
    let found: Vec<_> =
        jobs.iter().map(|job| (job.spec.name.as_str(), job.spec.block_bytes, job.spec.size_bytes)).collect();
    let mib = |count: u64| Some(count << 20);
    assert_eq!(found, [("a", 8192, mib(1)), ("b", 4096, mib(1)), ("c", 8192, mib(2))]);
}

/// As in the JSON of fio 3.33: each job has these options, and its own are the others.
#[test]
fn options_before_the_first_name_are_those_of_all_jobs() {
    let line = "--ioengine=null --bs=8k --name=a --size=1m --name=b --rw=write --size=2m --bs=4k --output=x";
    let found = plan(&words(line), &TestFiles::default()).unwrap();
    let pair = |name: &str, value: &str| (name.to_string(), value.to_string());
    assert_eq!(found.globals, [pair("ioengine", "null"), pair("bs", "8k")]);
    let own: Vec<_> = found.jobs.iter().map(|job| job.options.clone()).collect();
    assert_eq!(own[0], [pair("name", "a"), pair("size", "1m")]);
    assert_eq!(own[1], [pair("name", "b"), pair("rw", "write"), pair("size", "2m"), pair("bs", "4k")]);
    let sizes: Vec<_> =
        found.jobs.iter().map(|job| (job.spec.block_bytes, job.spec.size_bytes, job.engine)).collect();
    assert_eq!((sizes[0].0, sizes[1].0, sizes[0].2), (8192, 4096, sizes[1].2));
    // A job file's [global] adds to them, and a job of the command line has them too.
    let files = test_files("[global]\nsize=1m\nbs=16k\n[x]\nrw=read\n");
    let found = plan(&words("--ioengine=null --bs=8k a.fio --name=y --size=3m"), &files).unwrap();
    assert_eq!(found.globals, [pair("ioengine", "null"), pair("size", "1m"), pair("bs", "16k")]);
    let blocks: Vec<_> = found.jobs.iter().map(|job| (&*job.spec.name, job.spec.block_bytes)).collect();
    assert_eq!(blocks, [("x", 16_384), ("y", 8192)]);
    // Without a name they are the options of the one job.
    let found = plan(&words("--ioengine=null --bs=8k"), &TestFiles::default()).unwrap();
    assert!(found.globals.is_empty() && found.jobs[0].options.len() == 2);
}

#[test]
fn each_file_is_read_once_and_passed_on() {
    struct Once(std::cell::RefCell<Vec<String>>);
    impl Lookup for Once {
        fn file(&self, path: &str) -> Result<String, String> {
            let mut read = self.0.borrow_mut();
            assert!(!read.contains(&path.to_string()), "{path} is read again");
            read.push(path.to_string());
            Ok(match path {
                "-" => "include part\n[a]\ninclude part\n[b]\nioengine=null\n".to_string(),
                _ => "size=1m\nioengine=null\n".to_string(),
            })
        }

        fn variable(&self, _: &str) -> Option<String> {
            None
        }
    }
    let found = plan(&words("-"), &Once(Default::default())).unwrap();
    let paths: Vec<&str> = found.files.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!((found.jobs.len(), paths), (2, vec!["-", "part"]));
}

#[test]
fn directions_have_values_of_their_own() {
    let job = |options: &str| {
        let line = format!("--ioengine=null --size=1m --rw=randrw {options}");
        plan(&words(&line), &TestFiles::default()).map(|mut plan| plan.jobs.remove(0).spec)
    };
    let spec = job("--percentage_random=50,100 --blockalign=8k,,16k").unwrap();
    assert_eq!(spec.random_percent, [50, 100, 100]);
    assert_eq!(spec.align_bytes, [Some(8192), None, Some(16_384)]);
    assert_eq!(job("--percentage_random=20 --ba=8k").unwrap().random_percent, [20; 3]);
    assert_eq!(job("--percentage_random=,5,7").unwrap().random_percent, [100, 5, 7]);
    for (options, message) in [
        ("--percentage_random=1,2,3,4", "at most three values"),
        ("--percentage_random=50,101", "between 0 and 100"),
        ("--rwmixread=50,100", "it is one number, the same for reads, writes and trims"),
        ("--iodepth=4,8", "it is one number"),
        ("--bandwidth-log", "write_bw_log has each job's"),
        ("--bandwidth_log=x", "write_bw_log has each job's"),
        ("--latency-log", "write_lat_log"),
    ] {
        let error = job(options).unwrap_err().to_string();
        assert!(error.contains(message), "{options}: {error}");
    }
}

#[test]
fn sizes_and_times_have_fios_units() {
    let job = |line: &str| plan(&words(line), &TestFiles::default()).unwrap().jobs.remove(0);
    let cases = [("size=4k", 4096), ("size=1MiB", 1 << 20), ("size=0x1000", 4096), ("size=3gb", 3 << 30)];
    for (option, bytes) in cases {
        let line = format!("--filename=x --{option}");
        assert_eq!(job(&line).spec.size_bytes, Some(bytes), "{option}");
    }
    let decimal = job("--filename=x --kb_base=1000 --size=4k --bs=1ki");
    assert_eq!((decimal.spec.size_bytes, decimal.spec.block_bytes), (Some(4000), 1024));
    assert_eq!(job("--filename=x --size=40%").spec.size_percent, Some(40));
    let share = |text: &str| job(&format!("--filename=x --size=1m --io_size={text}")).spec;
    assert_eq!((share("50%").io_bytes, share("50%").io_percent), (None, Some(50)));
    assert_eq!((share("100%").io_bytes, share("100%").io_percent), (None, None));
    assert_eq!((share("2m").io_bytes, share("2m").io_percent), (Some(2 << 20), None));
    let apart = |text: &str| job(&format!("--filename=x --offset_increment={text}")).spec;
    assert_eq!((apart("25%").offset_increment, apart("25%").offset_increment_percent), (0, 25));
    assert_eq!((apart("4k").offset_increment, apart("4k").offset_increment_percent), (4096, 0));
    let think = job("--filename=x --thinktime=50 --thinktime_spin=10ms --latency_target=1ms").spec;
    assert_eq!((think.think.ns, think.think.spin_ns), (50_000, 10_000_000));
    assert_eq!(think.latency_target.unwrap().target_ns, 1_000_000);
    let sizes = job("--filename=x --rw=rw --bs=,8k").spec.sizes.unwrap();
    assert_eq!(*sizes, [BlockSizes::Fixed(4096), BlockSizes::Fixed(8192), BlockSizes::Fixed(8192)]);
    assert!(
        job("--filename=x --rw=read --bs=,8k").spec.sizes.is_none(),
        "only the sizes of used directions count"
    );
}

#[test]
fn ioengine_modes_select_polling() {
    let polling =
        |line: &str| plan(&words(line), &TestFiles::default()).unwrap().jobs[0].engine_config.polling;
    assert_eq!(polling("--filename=x --ioengine=iou"), io_engines::EngineConfig::default().polling);
    assert!(polling("--filename=x --direct=1 --ioengine=iou-c").iopoll);
    let both = polling("--filename=x --direct=1 --ioengine=iou-s --hipri --sqthread_poll_cpu=3");
    assert!(both.sqpoll && both.iopoll && both.sqpoll_cpu == Some(3));
}

#[test]
fn kernel_engines_submit_and_reap_one_at_a_time_unless_told_otherwise() {
    let batches = |line: &str| {
        let config = plan(&words(line), &TestFiles::default()).unwrap().jobs[0].engine_config.clone();
        (config.batch_max, config.reap_max)
    };
    for engine in ["psync", "libaio", "io_uring", "iou-s"] {
        assert_eq!(batches(&format!("--filename=x --ioengine={engine} --iodepth=32")), (1, 1), "{engine}");
    }
    let given = "--filename=x --ioengine=libaio --iodepth=32";
    assert_eq!(batches(&format!("{given} --iodepth_batch=0 --iodepth_batch_complete_max=0")), (0, 0));
    assert_eq!(batches(&format!("{given} --iodepth_batch_submit=8")), (8, 1));
    for batching in ["--ioengine=null", "--filename=null:1g", "--filename=uring:/x"] {
        assert_eq!(batches(batching), (0, 0), "{batching}");
    }
    // A section takes the default of its own engine.
    let text = "[global]\nfilename=x\niodepth=8\n[a]\nioengine=null\n[b]\nioengine=libaio\niodepth_batch=4\n";
    let modes: Vec<u32> =
        parse_file(text).unwrap().jobs.iter().map(|job| job.engine_config.batch_max).collect();
    assert_eq!(modes, [0, 4]);
}

#[test]
fn a_section_overrides_the_global_ioengine_mode() {
    let text = "[global]\nioengine=iou-c\ndirect=1\nfilename=x\n[a]\n[b]\nioengine=iou-s\n[c]\nioengine=iou\n\
                [d]\nioengine=iou\nhipri\n[e]\nioengine=psync\n";
    let plan = parse_file(text).unwrap();
    let polling_flags = |job: &PerfJob| (job.engine_config.polling.iopoll, job.engine_config.polling.sqpoll);
    let modes: Vec<_> = plan.jobs.iter().map(polling_flags).collect();
    assert_eq!(modes, [(true, false), (false, true), (false, false), (true, false), (false, false)]);
}

#[test]
fn options_without_effect_are_rejected() {
    for (option, named) in [
        ("--startdelay=5s", "startdelay"),
        ("--nice=5", "nice"),
        ("--ioscheduler=kyber", "ioscheduler"),
        ("--directory=/tmp", "directory"),
        ("--nrfiles=4", "nrfiles"),
        ("--nonvectored=0", "nonvectored"),
    ] {
        let error = plan(&words(&format!("--filename=null:1g {option}")), &TestFiles::default()).unwrap_err();
        assert!(error.reason.contains(named) && error.reason.contains("ioengine=bdev"), "{option}: {error}");
    }
    for option in ["--latency_window=1s", "--latency_percentile=99"] {
        let error = plan(&words(&format!("--filename=x {option}")), &TestFiles::default()).unwrap_err();
        assert!(error.reason.contains("latency_target"), "{option}: {error}");
    }
    for percent in ["0", "-1", "101", "nan", "inf"] {
        let line = format!("--filename=x --latency_target=1ms --latency_percentile={percent}");
        assert!(plan(&words(&line), &TestFiles::default()).is_err(), "{percent}");
    }
    let flushes = |line: &str| {
        let plan = plan(&words(&format!("--filename=x {line}")), &TestFiles::default()).unwrap();
        (plan.jobs[0].spec.flush_every, plan.jobs[0].engine_config.data_sync)
    };
    assert_eq!(flushes("--fsync=4 --fdatasync=0"), (4, false), "a count of 0 only disables its own kind");
    assert_eq!((flushes("--fsync=4 --fdatasync=2"), flushes("--fsync=4 --fsync=0")), ((2, true), (0, false)));
}

#[test]
fn option_names_are_unique_and_have_help_texts() {
    let mut names: Vec<&str> =
        OPTIONS.iter().flat_map(|o| std::iter::once(&o.name).chain(o.aliases)).copied().collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
    assert!(
        OPTIONS
            .iter()
            .all(|option| option.help.len() > 3 || option.name == "nice" || option.name == "cpus_allowed")
    );
}

#[test]
fn comments_aliases_and_empty_last_elements_are_read_as_fio_reads_them() {
    let text = "[a] ; section\nfilename=x # device\nnumjobs=4\t; four\nbs=8k;after\nthreads=1\nfileoffset=4k\n\
                random_distribution=zoned:50/5:30/15:20/\npercentile_list=50:99:\ncpumask=5\n";
    let job = parse_file(text).unwrap().jobs.remove(0);
    assert_eq!((job.filenames[0].as_str(), job.numjobs, job.spec.block_bytes), ("x", 4, 8192));
    assert!(job.thread);
    assert_eq!((job.spec.offset_bytes, job.percentiles.as_slice()), (4096, [50.0, 99.0].as_slice()));
    assert_eq!(job.cpus.as_deref(), Some([0, 2].as_slice()));
    let Distribution::Zoned(zones) = &job.spec.distribution else { panic!("{:?}", job.spec.distribution) };
    assert_eq!(zones[2].size, crate::ZoneSize::Percent(80.0));
}

/// The errors of job files that ask for what makes no sense.
#[test]
fn options_that_do_nothing_together_are_rejected() {
    for (options, reason) in [
        ("fill_device=1\nrw=randread", "needs --rw=write"),
        ("rate_cycle=500", "does nothing without --rate_min"),
        ("ignore_error=,,EILSEQ", "mismatches of verify are never ignored"),
        ("ignore_error=EWHAT", "EWHAT is none of"),
        ("zonemode=strided", "needs --zonesize"),
        ("zonesize=1k", "--zonerange is below the block size"),
        ("zonesize=1m\nverify=md5\nrw=write", "excludes verify"),
        ("dedupe_mode=working_set", "do nothing without --dedupe_percentage"),
        ("dedupe_percentage=10\nverify=md5\nrw=write", "--verify sets the content"),
        ("serialize_overlap=1\nrw=randwrite", "needs --verify"),
        ("verify_backlog=4", "does nothing without --verify"),
        ("fallocate=keep", "files have their size before"),
        ("ioengine=cpuio", "needs --cpuload"),
        ("ioengine=cpuio\ncpuload=50", "needs --runtime"),
        ("ioengine=exec", "needs --program"),
        ("ioengine=bdev\nflow=2", "--flow is for the kernel's engines"),
        ("exit_what=phase", "it is group, stonewall or all"),
    ] {
        let error = parse_file(&format!("[a]\nfilename=x\n{options}\n")).unwrap_err();
        assert!(error.to_string().contains(reason), "{options}: {error}");
    }
}

#[test]
fn limits_zones_and_contents_have_fios_meaning() {
    let text = "[global]\nfilename=a:b\nfilesize=4m\nflow_sleep=100\n\
                [one]\nsize=1g\ncontinue_on_error=write\nignore_error=,ENOSPC:5\nwrite_bw_log\n\
                rate_min=1k,2k\nzonesize=1m\nzoneskip=3m\n\
                [two]\nflow=3\nflow_id=7\ndedupe_percentage=50\ndedupe_mode=working_set\ndedupe_working_set_percentage=20\n\
                buffer_pattern=0xab\nsize=1m\ncreate_on_open=1\n";
    let jobs = parse_file(text).unwrap().jobs;
    let (one, two) = (&jobs[0].spec, &jobs[1].spec);
    assert_eq!((one.size_bytes, one.io_bytes), (Some(8 << 20), Some(1 << 30)));
    assert_eq!((two.size_bytes, two.io_bytes), (Some(8 << 20), Some(1 << 20)));
    assert_eq!((one.errors.continues, &one.errors.ignored), ([false, true], &[vec![], vec![28, 5]]));
    assert_eq!(one.rate_minima.bytes, [Some(1024), Some(2048), Some(2048)]);
    let zones = StridedZones { range_bytes: 1 << 20, size_bytes: 1 << 20, skip_bytes: 3 << 20 };
    assert_eq!((one.zones, one.flow, two.zones), (Some(zones), None, None));
    assert_eq!(one.log.bandwidth.as_deref(), Some(std::path::Path::new("one")));
    assert_eq!(two.flow, Some(FlowOptions { id: 7, weight: 3, sleep_ns: 100_000 }));
    let BufferContent::Reducible(content) = &two.content else { panic!("{:?}", two.content) };
    assert_eq!((content.working_set_percent, content.pattern.as_slice()), (Some(20), [0xab].as_slice()));
    assert!(jobs[0].allocates && !jobs[1].allocates);
}

#[test]
fn no_hint_points_to_a_rejected_option() {
    let is_refused = |name: &str| {
        OPTIONS.iter().any(|option| option.name == name && matches!(option.support, Support::Refused(_)))
    };
    for option in OPTIONS {
        // A name with a letter too few or too many.
        for typo in [option.name[..option.name.len() - 1].to_string(), format!("{}x", option.name)] {
            let near = super::options::nearest(&typo);
            assert!(near.is_none_or(|near| !is_refused(near)), "{typo}: {near:?}");
        }
    }
}

#[test]
fn options_without_effect_have_one_warning_each() {
    let text =
        "[global]\nfilename=x\ngtod_reduce=1\n[a]\noverwrite=1\nunlink=1\n[b]\ngtod_reduce=1\niomem=shm\n";
    let plan = parse_file(text).unwrap();
    let named: Vec<&str> = plan.warnings.iter().filter_map(|line| line.split(' ').nth(1)).collect();
    assert_eq!(named, ["gtod_reduce=1", "overwrite=1", "unlink=1", "iomem=shm"]);
    assert!(plan.warnings[0].starts_with("a.fio:3: gtod_reduce=1 has no effect: "), "{:?}", plan.warnings);
    for refused in ["verify_state_load=1", "mem=cudamalloc", "iodepth_batch_complete_min=8"] {
        let error = parse_file(&format!("[a]\nfilename=x\n{refused}\n")).unwrap_err().to_string();
        assert!(error.contains(&format!("--{refused} is not supported: ")), "{error}");
    }
    // The best-known command line, and a cloud's documentation.
    for line in [
        "--randrepeat=1 --ioengine=libaio --direct=1 --gtod_reduce=1 --name=test --filename=test --bs=4k \
         --iodepth=64 --size=4G --readwrite=randrw --rwmixread=75",
        "--filename=/dev/device --direct=1 --rw=randread --bs=4k --ioengine=libaio --iodepth=256 --runtime=120 \
         --numjobs=4 --time_based --group_reporting --name=iops-test-job --eta-newline=1 --readonly",
    ] {
        let plan = super::plan(&words(line), &TestFiles::default()).unwrap();
        assert_eq!((plan.jobs.len(), plan.warnings.len()), (1, 1), "{line}");
    }
    // A value may be the next word.
    let line = "--name=a --filename=x --fallocate none --mem malloc --unlink --rw=read";
    let plan = super::plan(&words(line), &TestFiles::default()).unwrap();
    assert_eq!((plan.jobs.len(), plan.warnings.len()), (1, 2), "{:?}", plan.warnings);
    let error =
        super::plan(&words("--name=a --filename=x --mem"), &TestFiles::default()).unwrap_err().to_string();
    assert!(error.contains("--mem needs a value"), "{error}");
}

#[test]
fn a_dash_between_sizes_separates_reads_and_writes_as_in_fio() {
    let plan = parse_file("[global]\nfilename=x\n[a]\nrw=randrw\nbs=4k-512k\n[b]\nbs=8k\n").unwrap();
    let fixed = |bytes: u32| BlockSizes::Fixed(bytes);
    let sizes = plan.jobs[0].spec.sizes.as_deref().unwrap();
    assert_eq!(*sizes, [fixed(4096), fixed(512 << 10), fixed(512 << 10)]);
    let expected = "job a: bs=4k-512k is bs=4k,512k, as in fio: reads and writes; bsrange is a range";
    assert_eq!(plan.warnings, [expected]);
    let error = parse_file("[a]\nfilename=x\nbs=4k-8k,16k\n").unwrap_err().to_string();
    assert!(error.contains("it is a size"), "{error}");
}

#[test]
fn an_arrival_process_without_a_rate_has_a_warning() {
    let warnings = |text: &str| parse_file(text).unwrap().warnings;
    assert_eq!(
        warnings("[a]\nfilename=x\nrate_process=poisson\n[b]\nfilename=x\nrate=1m\nrate_process=poisson\n"),
        ["job a: rate_process=poisson has no effect: without rate or rate_iops no arrivals are scheduled"]
    );
    let global = "[global]\nfilename=x\nrate_process=linear\n[a]\n";
    assert_eq!(
        warnings(global),
        ["[global]: rate_process=linear has no effect: without rate or rate_iops no arrivals are scheduled"]
    );
    // It is for those jobs that have a rate.
    assert_eq!(warnings(&format!("{global}[b]\nrate_iops=5\n")), [""; 0]);
    let line = "--name=a --filename=x --rate_process=poisson";
    let plan = super::plan(&words(line), &TestFiles::default()).unwrap();
    assert_eq!(plan.warnings.len(), 1, "{:?}", plan.warnings);
}

#[test]
fn a_section_that_is_not_selected_says_nothing_of_the_run() {
    let text = "[a]\nfilename=x\n[b]\nfilename=y\nspdk_json_conf=b.json\ngtod_reduce=1\n";
    let files = test_files(text);
    let plan = super::plan(&words("--section=a a.fio"), &files).unwrap();
    assert_eq!((plan.jobs.len(), plan.run_option("config"), plan.warnings.len()), (1, None, 0));
    let plan = super::plan(&words("--section=b a.fio"), &files).unwrap();
    assert_eq!((plan.run_option("config"), plan.warnings.len()), (Some("b.json"), 1));
}

#[test]
fn jobs_of_spdks_plugins_name_bdevs_and_controllers() {
    let text = "[global]\nioengine=spdk_bdev\nspdk_json_conf=./bdev.json\nthread=1\nspdk_mem=1024\n\
                spdk_single_seg=1\n[a]\nfilename=Malloc0\n\
                [b]\nioengine=spdk\nfilename=trtype=PCIe traddr=0000.04.00.0 ns=1\n";
    let plan = parse_file(text).unwrap();
    assert_eq!((plan.run_option("config"), plan.warnings.len()), (Some("./bdev.json"), 2));
    assert_eq!(plan.jobs[0].engine, Some(EngineName::Bdev));
    assert_eq!(plan.jobs[1].filenames, ["nvme+pcie://0000:04:00.0?ns=1"]);
    let error = parse_file(&format!("{text}spdk_json_conf=other.json\n")).unwrap_err().to_string();
    assert!(error.contains("other.json: the run has the configuration file ./bdev.json already"), "{error}");
}

/// Every option of fio 3.33 and of later versions that this program lacks is rejected with a reason. One that is no
/// option at all gets the nearest name as a hint, which for an option of fio is wrong.
#[test]
fn options_of_fio_are_known() {
    let known = [
        "atomic",
        "block_error_percentiles",
        "disk_util",
        "fadvise_hint",
        "force_async",
        "fsync_on_close",
        "hipri_percentage",
        "hugepage-size",
        "lockfile",
        "log_alternate_epoch",
        "log_entries",
        "log_max_value",
        "log_store_compressed",
        "log_unix_epoch",
        "merge_blktrace_file",
        "nowait",
        "offset_align",
        "per_job_logs",
        "replay_redirect",
        "significant_figures",
        "stats",
        "sync_file_range",
        "thp",
        "uncached",
        "unique_filename",
        "unlink_each_loop",
        "verifysort",
        "write_barrier",
        "write_hint",
        "fdp",
        "pi_act",
        "write_mode",
        "alloc-size",
        "max-jobs",
        "trigger",
        "daemonize",
    ];
    for name in known {
        assert!(find(&name.replace('-', "_")).is_some(), "{name}");
    }
    let parse = |option: &str| parse_file(&format!("[a]\nfilename=x\nsize=1m\n{option}\n"));
    assert_eq!(parse("per_job_logs=1").unwrap().warnings.len(), 1);
    for rejected in ["per_job_logs=0", "lockfile=exclusive", "hipri_percentage=50", "fadvise_hint=often"] {
        assert!(parse(rejected).is_err(), "{rejected}");
    }
    let job = |option: &str| parse(option).unwrap().jobs.remove(0);
    assert!(job("fsync_on_close=1").spec.flush_at_end && !job("fsync_on_close=0").spec.flush_at_end);
    assert_eq!(job("fadvise_hint=random").fadvise_hint, FadviseHint::Random);
    assert_eq!(job("bs=4k").fadvise_hint, FadviseHint::Workload);
}

/// A hint that names an option as what to use instead names one that is supported.
#[test]
fn hints_never_name_an_option_that_is_refused() {
    for option in OPTIONS {
        let Support::Refused(why) = option.support else { continue };
        for word in
            why.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|word| word.contains('_'))
        {
            let refused = find(word).is_none_or(|named| matches!(named.support, Support::Refused(_)));
            assert!(!refused, "{}: {why}", option.name);
        }
    }
}

proptest! {
    /// The parser never panics, and every error has a reason.
    #[test]
    fn any_text_is_parsed_or_rejected(text in "([\\[\\]a-z=:/0-9%,.;#${} ]{0,30}\n){0,12}") {
        if let Err(error) = parse_file(&text) {
            prop_assert!(!error.reason.is_empty());
        }
    }

    /// Any value of any option is accepted or rejected.
    #[test]
    fn any_option_value_is_accepted_or_rejected(index in 0..OPTIONS.len(), value in "[-0-9a-zA-Z:/,.%x\"]{0,24}") {
        let name = OPTIONS[index].name;
        let _ = parse_file(&format!("[a]\nfilename=x\n{name}={value}\n"));
    }

    /// The options of a plan, written to a job file, parse to the same jobs.
    #[test]
    fn written_options_round_trip(depth in 1u32..1000, bs in 1u32..64, mix in 0u8..=100, jobs in 1u32..9) {
        let text = format!("[j]\nfilename=x\nrw=randrw\niodepth={depth}\nioengine=libaio\nbs={bs}k\nrwmixread={mix}\nnumjobs={jobs}\n");
        let first = parse_file(&text).unwrap();
        let lines: Vec<String> =
            first.jobs[0].options.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
        let second = parse_file(&format!("[j]\n{}", lines.concat())).unwrap();
        prop_assert_eq!(format!("{:?}", first.jobs), format!("{:?}", second.jobs));
    }
}

#[test]
fn sequences_are_steps_of_sequential_and_lengths_of_random_workloads() {
    let parse = |options: &str| {
        let plan = parse_file(&format!("[a]\nfilename=f\n{options}\n"))?;
        Ok::<_, JobPlanError>(plan.jobs[0].spec.sequence)
    };
    let sequence = |step_bytes, length, repeats| crate::OffsetSequence { step_bytes, length, repeats };
    assert_eq!(parse("rw=read:-8k"), Ok(sequence(-8192, 1, false)));
    assert_eq!(parse("rw=write:112k"), Ok(sequence(114_688, 1, false)));
    assert_eq!(parse("rw=randread:8\nrw_sequencer=identical"), Ok(sequence(0, 8, true)));
    assert_eq!(parse("rw=randread:8\nrw=randread"), Ok(sequence(0, 1, false)));
    for (options, why) in [
        ("rw=randread:0", "between 1"),
        ("rw=randread:-1", "number"),
        ("rw=read:x", "it is a size"),
        ("rw=read:9223372036854775808", "too l"),
        ("rw_sequencer=random", "sequential or identical"),
        ("rw=up:8", "it is one of read"),
    ] {
        let error = parse(options).unwrap_err().to_string();
        assert!(error.contains(why), "{options}: {error}");
    }
}

/// The phases of jobs; each letter is a job, and `b<a` is `b` with `wait_for=a`. A new phase follows a space.
#[test]
fn wait_for_starts_a_phase_or_is_rejected() {
    let phases = |jobs: &[&str]| {
        let section = |job: &&str| {
            let (name, waits) = job.split_once('<').unwrap_or((*job, ""));
            let (waits, stonewall) = waits.split_once('|').unwrap_or((waits, "0"));
            let wait_for = if waits.is_empty() { String::new() } else { format!("wait_for={waits}\n") };
            format!("[{name}]\nfilename=f\nstonewall={stonewall}\n{wait_for}")
        };
        let plan = parse_file(&jobs.iter().map(section).collect::<String>()).map_err(|error| error.reason)?;
        let mut text = String::new();
        for job in &plan.jobs {
            text += if job.begins_phase() && !text.is_empty() { " " } else { "" };
            text += &job.spec.name;
        }
        Ok::<String, String>(text)
    };
    for (jobs, expected) in [
        (["a", "b<a", "c<b"].as_slice(), "a b c"),
        (&["a", "b<a", "c<a", "d<|1", "e"], "a bc de"),
        (&["a", "a", "b<a"], "aa b"),
        (&["a", "b", "c<a|1"], "ab c"),
    ] {
        assert_eq!(phases(jobs).as_deref(), Ok(expected), "{jobs:?}");
    }
    for (jobs, why) in [
        (["a", "b<c", "c"].as_slice(), "--wait_for=c: no job"),
        (&["a<a"], "--wait_for=a: no job"),
        (&["a", "b", "c<a"], "other jobs run beside a"),
        (&["a", "b<a", "c<b", "d<a"], "other jobs run beside a"),
        (&["a", "b<a", "c"], "c would start beside"),
    ] {
        let error = phases(jobs).unwrap_err();
        assert!(error.contains(why), "{jobs:?}: {error}");
    }
}

#[test]
fn pauses_and_trims_before_writes_are_checked() {
    let job = |line: &str| plan(&words(&format!("--filename=x {line}")), &TestFiles::default());
    let one = job("--thinktime=1 --thinktime_blocks=0 --thinktime_blocks_type=issue --thinktime_iotime=2");
    let think = one.unwrap().jobs[0].spec.think;
    assert_eq!(
        (think.ns, think.blocks, think.counts_issued, think.interval_ns),
        (1000, 1, true, 2_000_000_000)
    );
    assert_eq!(job("--rw=randtrimwrite").unwrap().jobs[0].spec.workload, Workload::RandTrimWrite);
    let refused = [
        ("--thinktime_iotime=1", "--thinktime_iotime does nothing without --thinktime"),
        ("--thinktime_blocks=2", "--thinktime_blocks does nothing without --thinktime"),
        ("--thinktime=1 --thinktime_blocks_type=both", "it is complete or issue"),
        ("--rw=trimwrite --bs=4k,8k,4k", "--rw=trimwrite excludes several block sizes"),
        ("--rw=trimwrite --rate_iops=10", "--rw=trimwrite excludes rate"),
        ("--rw=randtrimwrite --verify=md5", "--rw=randtrimwrite excludes verify"),
    ];
    for (line, message) in refused {
        let error = job(line).unwrap_err().to_string();
        assert!(error.contains(message), "{line}: {error}");
    }
}

#[test]
fn histogram_logs_have_a_time_between_lines() {
    let job = |line: &str| plan(&words(&format!("--filename=x --name=n {line}")), &TestFiles::default());
    let log =
        job("--write_hist_log=h --log_hist_msec=20 --log_hist_coarseness=6").unwrap().jobs.remove(0).spec.log;
    let path = log.histograms.unwrap();
    assert_eq!((path.to_str(), log.histograms_ns, log.histograms_coarseness), (Some("h"), 20_000_000, 6));
    let refused = [
        ("--write_hist_log=h", "needs --log_hist_msec"),
        ("--log_hist_msec=5", "nothing without --write_hist_log"),
        ("--write_hist_log=h --log_hist_msec=1 --log_hist_coarseness=7", "log_hist_coarseness"),
    ];
    for (line, message) in refused {
        let error = job(line).unwrap_err().to_string();
        assert!(error.contains(message), "{line}: {error}");
    }
}

#[test]
fn the_steady_state_has_fios_criteria() {
    let job = |line: &str| plan(&words(&format!("--filename=x {line}")), &TestFiles::default());
    let steady = |line: &str| job(line).unwrap().jobs[0].spec.steady.unwrap();
    let one = steady("--ss=bw_slope:1m --ss_dur=1m --ss_ramp=2");
    assert_eq!((one.criterion.metric(), one.criterion.limit), ("bw_slope", 1_048_576.0));
    assert_eq!((one.duration_s, one.ramp_ns, one.criterion.in_percent), (60, 2_000_000_000, false));
    let percent = steady("--steadystate=iops:0.3% --steadystate_duration=2").criterion;
    assert_eq!((percent.metric(), percent.limit, percent.in_percent), ("iops", 0.3, true));
    assert_eq!(steady("--ss_dur=5").criterion.metric(), "iops_slope");
    let refused = [
        ("--ss=iops:5%", "nothing without --steadystate_duration"),
        ("--ss=iops --ss_dur=5", "iops_slope, bw or bw_slope"),
        ("--ss=lat:5% --ss_dur=5", "iops_slope, bw or bw_slope"),
        ("--ss=iops:0 --ss_dur=5", "above 0"),
        ("--ss=iops:5% --ss_dur=1", "2 to 604800 seconds"),
    ];
    for (line, message) in refused {
        let error = job(line).unwrap_err().to_string();
        assert!(error.contains(message), "{line}: {error}");
    }
}
