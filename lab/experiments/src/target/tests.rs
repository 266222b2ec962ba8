use super::*;

fn wanted(devices: &[&str]) -> Wanted {
    Wanted {
        devices: devices.iter().map(|d| d.to_string()).collect(),
        disk_bytes: 1 << 20,
        ..Wanted::default()
    }
}

fn said(wanted: &Wanted) -> String {
    find(wanted, &Host::default(), 1, true).unwrap_err().to_string()
}

#[test]
fn what_cannot_be_driven_is_refused_in_one_line() {
    assert!(said(&wanted(&["/dev/nothing-of-that-name"])).contains("No such file"));
    assert!(said(&wanted(&["/etc/passwd"])).contains("no block device"));
    assert!(said(&Wanted { file: Some("/dev/null".into()), ..wanted(&[]) }).contains("no ordinary file"));
    assert!(said(&Wanted { file: Some("/etc/hostname".into()), ..wanted(&[]) }).contains("too few"));
    assert!(
        said(&Wanted { destroy: vec!["/dev/other".into()], ..wanted(&["null:1g"]) }).contains("names no")
    );
    assert!(said(&Wanted { file: Some("/x".into()), ..wanted(&["null:1g"]) }).contains("exclude"));
    assert!(said(&wanted(&["null:1g", "null:1g"])).contains("twice"));
    let rootless = find(&wanted(&[]), &Host::default(), 1, false).unwrap_err().to_string();
    assert!(rootless.contains("--file"), "{rootless}");
    let many = vec!["null:1g"; DEVICES_MAX + 1];
    assert!(said(&wanted(&many)).contains("too many"));
}

#[test]
fn a_file_that_is_there_is_only_read_unless_it_may_be_lost() {
    let path = std::env::temp_dir().join(format!("ringbolt-target-{}", std::process::id()));
    fill(&path, 2 << 20).unwrap();
    assert!(fs::read(&path).unwrap().chunks(4096).all(|block| block.iter().any(|byte| *byte != 0)));
    let of = |destroy: &[&str]| Wanted {
        file: Some(path.clone()),
        destroy: destroy.iter().map(|d| d.to_string()).collect(),
        ..wanted(&[])
    };
    let found = |wanted: &Wanted| find(wanted, &Host::default(), 1, false).unwrap().remove(0);
    assert!(!found(&of(&[])).writable);
    assert!(found(&of(&[path.to_str().unwrap()])).writable);
    fs::remove_file(&path).unwrap();
    assert!(found(&of(&[])).writable, "one that the lab makes may be written to");
}

#[test]
fn names_of_devices_of_our_own_are_told_from_paths() {
    assert!(is_uri("null:1g") && is_uri("nvme+tcp://127.0.0.1:4420/nqn"));
    assert!(!is_uri("/dev/nvme0n1") && !is_uri("./a:b") && !is_uri(":x"));
}
