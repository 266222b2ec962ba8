use super::*;

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("ringbolt-locks-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn device(kind: Kind, place: impl Into<String>) -> Device {
    Device {
        kind,
        place: place.into(),
        name: None,
        size_bytes: 1 << 20,
        writable: true,
        described: String::new(),
    }
}

fn file(path: &Path) -> Device {
    device(Kind::File, path.to_str().unwrap())
}

fn refusal(locks: &mut DeviceLocks, device: &Device) -> String {
    locks.lock(device, &Host::default()).unwrap_err().to_string()
}

#[test]
fn a_file_has_one_run_under_all_of_its_names() {
    let folder = Folder::new("names");
    let (one, link, hard) = (folder.0.join("one"), folder.0.join("link"), folder.0.join("hard"));
    fs::write(&one, "x").unwrap();
    std::os::unix::fs::symlink(&one, &link).unwrap();
    fs::hard_link(&one, &hard).unwrap();
    let host = Host::default();
    let records = folder.0.join("records");
    let mut first = DeviceLocks::new(&records);
    first.lock(&file(&one), &host).unwrap();
    first.lock(&file(&one), &host).unwrap();
    assert!(refusal(&mut first, &file(&link)).contains("the same device as"));
    let mut second = DeviceLocks::new(&records);
    for name in [&one, &link, &hard] {
        let said = refusal(&mut second, &file(name));
        assert!(said.contains(&format!("in use by process {} (", std::process::id())), "{said}");
    }
    // With records of its own, it is the file itself that is locked.
    let mut elsewhere = DeviceLocks::new(&folder.0.join("other"));
    let said = refusal(&mut elsewhere, &file(&hard));
    assert!(said.contains(&format!("in use by process {}", std::process::id())), "{said}");
    drop(first);
    second.lock(&file(&link), &host).unwrap();
    drop((second, elsewhere));
    assert_eq!(fs::read_dir(records).unwrap().count(), 0);
}

#[test]
fn a_file_that_is_not_there_yet_is_locked_by_its_place() {
    let folder = Folder::new("place");
    let path = folder.0.join("new\nfile");
    let host = Host::default();
    let (mut first, mut second) =
        (DeviceLocks::new(&folder.0.join("r")), DeviceLocks::new(&folder.0.join("r")));
    first.lock(&file(&path), &host).unwrap();
    assert!(refusal(&mut second, &file(&path)).contains("in use by"));
    fs::write(&path, "x").unwrap();
    assert!(refusal(&mut second, &file(&path)).contains("in use by"));
    let hard = folder.0.join("hard");
    fs::hard_link(&path, &hard).unwrap();
    // Once it is there, the file itself is locked too.
    first.lock(&file(&path), &host).unwrap();
    assert!(refusal(&mut second, &file(&hard)).contains("in use by"));
}

#[test]
fn the_record_of_a_process_that_is_gone_refuses_nobody() {
    let folder = Folder::new("stale");
    let path = folder.0.join("one");
    fs::write(&path, "x").unwrap();
    for key in keys(&path, &Host::default()) {
        fs::write(folder.0.join(format!("device-{key}")), "{\"pid\":1,\"started\":\"1\",\"program\":\"x\"}")
            .unwrap();
    }
    DeviceLocks::new(&folder.0).lock(&file(&path), &Host::default()).unwrap();
}

#[test]
fn the_records_of_processes_that_are_gone_are_removed_and_no_others() {
    let folder = Folder::new("left");
    let (path, records) = (folder.0.join("one"), folder.0.join("r"));
    fs::write(&path, "x").unwrap();
    let mut locks = DeviceLocks::new(&records);
    locks.lock(&file(&path), &Host::default()).unwrap();
    let count = || fs::read_dir(&records).unwrap().count();
    let of_ours = count();
    fs::write(records.join("device-block-7:0"), "").unwrap();
    remove_left_behind(&records);
    assert_eq!(count(), of_ours);
    assert!(DeviceLocks::new(&records).lock(&file(&path), &Host::default()).is_err());
}

#[test]
fn a_shared_lock_is_waited_for() {
    let folder = Folder::new("shared");
    let path = folder.0.join("one");
    fs::write(&path, "x").unwrap();
    let other = File::open(&path).unwrap();
    flock(&other, FlockOperation::LockShared).unwrap();
    let probing = std::thread::spawn(move || {
        std::thread::sleep(POLL * 3);
        drop(other);
    });
    DeviceLocks::new(&folder.0.join("r")).lock(&file(&path), &Host::default()).unwrap();
    probing.join().unwrap();
}

#[test]
fn a_node_can_be_used_by_our_block_layer_for_a_time() {
    let folder = Folder::new("closed");
    let (path, records) = (folder.0.join("one"), folder.0.join("r"));
    fs::write(&path, "x").unwrap();
    let host = Host::default();
    let mut locks = DeviceLocks::new(&records);
    locks.lock(&file(&path), &host).unwrap();
    let layer = File::open(&path).unwrap();
    assert!(!try_lock(&layer).unwrap());
    locks.close_nodes();
    assert!(try_lock(&layer).unwrap());
    let said = refusal(&mut DeviceLocks::new(&records), &file(&path));
    assert!(said.contains("in use by"), "the record stays: {said}");
    drop(layer);
    locks.reopen_nodes(&[file(&path), device(Kind::Uri, format!("uring:{}", path.display()))]).unwrap();
    assert!(!try_lock(&File::open(&path).unwrap()).unwrap());
}

#[test]
fn a_partition_has_the_number_of_its_disk() {
    let folder = Folder::new("partition");
    let disk = folder.0.join("sys/devices/sda");
    fs::create_dir_all(disk.join("sda1")).unwrap();
    fs::write(disk.join("dev"), "8:0\n").unwrap();
    fs::write(disk.join("sda1/dev"), "8:1\n").unwrap();
    fs::write(disk.join("sda1/partition"), "1\n").unwrap();
    let numbers = folder.0.join("sys/dev/block");
    fs::create_dir_all(&numbers).unwrap();
    std::os::unix::fs::symlink("../../devices/sda", numbers.join("8:0")).unwrap();
    std::os::unix::fs::symlink("../../devices/sda/sda1", numbers.join("8:1")).unwrap();
    let host = Host::at(&folder.0);
    assert_eq!(whole_disk("8:1", &host), "8:0");
    assert_eq!(whole_disk("8:0", &host), "8:0");
    assert_eq!(whole_disk("9:9", &host), "9:9");
}

#[test]
fn devices_of_our_own_are_locked_where_two_runs_would_share_them() {
    let folder = Folder::new("uri");
    let host = Host::default();
    let (mut first, mut second) = (DeviceLocks::new(&folder.0), DeviceLocks::new(&folder.0));
    for place in ["null:1g", "malloc:64m", "model:samsung-980-pro"] {
        first.lock(&device(Kind::Uri, place), &host).unwrap();
        second.lock(&device(Kind::Uri, place), &host).unwrap();
    }
    let path = folder.0.join("one");
    fs::write(&path, "x").unwrap();
    for place in ["nvme+pcie://0000:01:00.0?ns=1".to_string(), format!("uring:{}", path.display())] {
        first.lock(&device(Kind::Uri, place.clone()), &host).unwrap();
        assert!(refusal(&mut second, &device(Kind::Uri, place)).contains("in use by"));
    }
    assert!(refusal(&mut second, &file(&path)).contains("in use by"));
}
