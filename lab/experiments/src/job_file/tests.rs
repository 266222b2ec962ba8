use super::*;

fn parameters(text: &str) -> CellParameters {
    toml::from_str(text).unwrap()
}

#[test]
fn a_cell_renders_as_the_job_file_of_the_study() {
    let cell = parameters(
        "api = 'iou-c'\nrw = 'randread'\nblock_bytes = 4096\niodepth = 1\njobs = 1\ncores = 2\n\
         background = 2\nbackground_rw = 'randwrite'\nbackground_block_bytes = 65536\nbackground_iodepth = 128",
    );
    let options = parameters("norandommap = 1\nregisterfiles = 1");
    let filenames = ["/dev/nvme0n1".to_string(), "/dev/nvme1n1".to_string()];
    let job = CellJob {
        cell: &cell,
        options: &options,
        background_options: &options,
        filenames: &filenames,
        size_bytes: 1 << 20,
        cpus: &[0, 1],
        background_cpus: &[],
        runtime_s: 0.7,
        ramp_s: 0.2,
        seed: 7,
        logs: None,
    };
    assert_eq!(
        job.render(),
        "[global]\nioengine=io_uring\nhipri=1\nfilename=/dev/nvme0n1:/dev/nvme1n1\ndirect=1\nsize=100%\n\
         allow_file_create=0\ntime_based=1\nruntime=700ms\nramp_time=200ms\ngroup_reporting=1\nrandseed=7\n\n\
         [bg]\nnew_group=1\nrw=randwrite\nbs=65536\niodepth=128\nnumjobs=2\ncpus_allowed=0,1\nnorandommap=1\n\
         registerfiles=1\n\n[fg]\nnew_group=1\nrw=randread\nbs=4096\niodepth=1\nnumjobs=1\ncpus_allowed=0,1\n\
         norandommap=1\nregisterfiles=1\n"
    );
}

#[test]
fn io_uring_options_need_io_uring_and_colons_are_escaped() {
    let options = parameters("norandommap = 1\nfixedbufs = 1");
    for (api, filename, expected, absent) in [
        ("psync", "/dev/a", "ioengine=psync\nfilename=/dev/a\n", "fixedbufs"),
        ("iou-s", "/dev/a", "sqthread_poll=1", "hipri"),
        ("spdk", "null:1g", "ioengine=bdev\nfilename=null\\:1g\n", "fixedbufs"),
    ] {
        let cell = parameters(&format!("api = '{api}'\nrw = 'randread'\nblock_bytes = 512"));
        let filenames = [filename.to_string()];
        let none = CellParameters::new();
        let job = CellJob {
            cell: &cell,
            options: &options,
            background_options: &none,
            filenames: &filenames,
            ..CellJob {
                cell: &cell,
                options: &options,
                background_options: &none,
                filenames: &[],
                size_bytes: 1,
                cpus: &[],
                background_cpus: &[],
                runtime_s: 1.0,
                ramp_s: 0.0,
                seed: 0,
                logs: None,
            }
        };
        let text = job.render();
        assert!(text.contains(expected) && !text.contains(absent), "{api}: {text}");
        assert!(!text.contains("cpus_allowed") && !text.contains("[bg]"));
    }
}
