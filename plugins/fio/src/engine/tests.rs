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

#[test]
fn an_io_that_the_engine_does_not_do_is_refused_with_the_option_to_change() {
    let refusal = |op, offset, length, block_bytes| match checked_range(op, offset, length, block_bytes) {
        Err((INVALID, why)) => why,
        Err((errno, why)) => panic!("{errno}: {why}"),
        Ok(_) => String::new(),
    };
    for (op, offset, length, block_bytes, part) in [
        (
            Op::Read,
            0,
            2 << 20,
            512,
            "an I/O of 2097152 bytes at 0: this engine has blocks of at most 1 MiB, so --bs",
        ),
        (
            Op::Write,
            4096,
            1000,
            512,
            "an I/O of 1000 bytes at 4096: the device has blocks of 512 bytes; --bs,",
        ),
        (Op::Read, 100, 4096, 512, "4096 bytes at 100: the device has blocks of 512 bytes; --bs, --offset"),
        (Op::Write, 0, 512, 4096, "the device has blocks of 4096 bytes"),
        (Op::Write, 0, 0, 512, "it has no blocks of 512 bytes"),
    ] {
        let text = refusal(op, offset, length, block_bytes);
        assert!(text.contains(part), "{op:?} {offset} {length} {block_bytes}: {text}");
    }
    for (op, length) in [(Op::Read, 1 << 20), (Op::Write, 4096), (Op::Unmap, 1 << 30)] {
        assert_eq!(refusal(op, 8192, length, 4096), "");
    }
}
