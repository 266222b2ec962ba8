use super::*;

fn wanted(devices: &[&str]) -> DeviceRequest {
    DeviceRequest {
        devices: devices.iter().map(|d| d.to_string()).collect(),
        disk_bytes: 1 << 20,
        ..DeviceRequest::default()
    }
}

fn message(wanted: &DeviceRequest) -> String {
    resolve(wanted, &HostInfo::default(), 1, true).unwrap_err().to_string()
}

#[test]
fn unusable_devices_are_rejected_in_one_line() {
    assert!(message(&wanted(&["/dev/nothing-of-that-name"])).contains("No such file"));
    assert!(message(&wanted(&["/etc/passwd"])).contains("not a block device"));
    assert!(
        message(&DeviceRequest { file: Some("/dev/null".into()), ..wanted(&[]) })
            .contains("not a regular file")
    );
    assert!(
        message(&DeviceRequest { file: Some("/etc/hostname".into()), ..wanted(&[]) }).contains("too few")
    );
    assert!(
        message(&DeviceRequest { destroy: vec!["/dev/other".into()], ..wanted(&["null:1g"]) })
            .contains("names no")
    );
    assert!(message(&DeviceRequest { file: Some("/x".into()), ..wanted(&["null:1g"]) }).contains("exclude"));
    assert!(message(&wanted(&["null:1g", "null:1g"])).contains("twice"));
    let rootless = resolve(&wanted(&[]), &HostInfo::default(), 1, false).unwrap_err().to_string();
    assert!(rootless.contains("--file"), "{rootless}");
    let many = vec!["null:1g"; DEVICES_MAX + 1];
    assert!(message(&wanted(&many)).contains("too many"));
}

#[test]
fn an_existing_file_is_written_only_with_destroy_data() {
    let path = std::env::temp_dir().join(format!("ringbolt-target-{}", std::process::id()));
    write_pattern(&path, 2 << 20).unwrap();
    assert!(fs::read(&path).unwrap().chunks(4096).all(|block| block.iter().any(|byte| *byte != 0)));
    let of = |destroy: &[&str]| DeviceRequest {
        file: Some(path.clone()),
        destroy: destroy.iter().map(|d| d.to_string()).collect(),
        ..wanted(&[])
    };
    let found = |wanted: &DeviceRequest| resolve(wanted, &HostInfo::default(), 1, false).unwrap().remove(0);
    assert!(!found(&of(&[])).writable);
    assert!(found(&of(&[path.to_str().unwrap()])).writable);
    fs::remove_file(&path).unwrap();
    assert!(found(&of(&[])).writable, "one that the lab makes may be written to");
}

#[test]
fn bdev_uris_are_distinguished_from_paths() {
    assert!(is_uri("null:1g") && is_uri("nvme+tcp://127.0.0.1:4420/nqn"));
    assert!(!is_uri("/dev/nvme0n1") && !is_uri("./a:b") && !is_uri(":x"));
}
