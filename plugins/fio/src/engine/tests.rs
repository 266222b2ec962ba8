use super::*;

#[test]
fn the_size_of_a_device_is_that_of_its_uri() {
    assert_eq!(devices::bytes_of("malloc:64m?bs=4k"), Ok(64 << 20));
    assert_eq!(devices::bytes_of("null:1g"), Ok(1 << 30));
}

#[test]
fn a_name_that_is_no_uri_is_refused_with_what_may_be_given() {
    let error = devices::bytes_of("/dev/nvme0n1").unwrap_err();
    assert!(error.contains("is no URI") && error.contains("uring:/path"), "{error}");
    let error = devices::bytes_of("uring:/nonexistent").unwrap_err();
    assert!(error.contains("/nonexistent"), "{error}");
}

#[test]
fn jobs_of_a_process_share_a_ram_disk() {
    let mut jobs = [start().unwrap(), start().unwrap()];
    for job in &mut jobs {
        job.open("malloc:1m").unwrap();
    }
    jobs[0].close("malloc:1m");
    assert!(jobs[0].open("malloc:1m").is_ok());
}
