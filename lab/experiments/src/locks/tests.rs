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

fn device(kind: DeviceKind, location: impl Into<String>) -> Device {
    Device {
        kind,
        location: location.into(),
        name: None,
        size_bytes: 1 << 20,
        writable: true,
        described: String::new(),
    }
}

fn file(path: &Path) -> Device {
    device(DeviceKind::File, path.to_str().unwrap())
}

fn lock_error(locks: &mut DeviceLocks, device: &Device) -> String {
    locks.lock(device, &HostInfo::default()).unwrap_err().to_string()
}

#[test]
fn a_file_has_one_run_under_all_its_names() {
    let folder = Folder::new("names");
    let (one, link, hard) = (folder.0.join("one"), folder.0.join("link"), folder.0.join("hard"));
    fs::write(&one, "x").unwrap();
    std::os::unix::fs::symlink(&one, &link).unwrap();
    fs::hard_link(&one, &hard).unwrap();
    let host = HostInfo::default();
    let records = folder.0.join("records");
    let mut first = DeviceLocks::new(&records);
    first.lock(&file(&one), &host).unwrap();
    first.lock(&file(&one), &host).unwrap();
    assert!(lock_error(&mut first, &file(&link)).contains("the same device as"));
    let mut second = DeviceLocks::new(&records);
    for name in [&one, &link, &hard] {
        let message = lock_error(&mut second, &file(name));
        assert!(message.contains(&format!("in use by process {} (", std::process::id())), "{message}");
    }
    // With another directory of records, the lock of the file itself applies.
    let mut elsewhere = DeviceLocks::new(&folder.0.join("other"));
    let message = lock_error(&mut elsewhere, &file(&hard));
    assert!(message.contains(&format!("in use by process {}", std::process::id())), "{message}");
    drop(first);
    second.lock(&file(&link), &host).unwrap();
    drop((second, elsewhere));
    assert_eq!(fs::read_dir(records).unwrap().count(), 0);
}

#[test]
fn a_file_that_does_not_exist_is_locked_by_directory_and_name() {
    let folder = Folder::new("place");
    let path = folder.0.join("new\nfile");
    let host = HostInfo::default();
    let (mut first, mut second) =
        (DeviceLocks::new(&folder.0.join("r")), DeviceLocks::new(&folder.0.join("r")));
    first.lock(&file(&path), &host).unwrap();
    assert!(lock_error(&mut second, &file(&path)).contains("in use by"));
    fs::write(&path, "x").unwrap();
    assert!(lock_error(&mut second, &file(&path)).contains("in use by"));
    let hard = folder.0.join("hard");
    fs::hard_link(&path, &hard).unwrap();
    // Once it exists, the file itself is locked too.
    first.lock(&file(&path), &host).unwrap();
    assert!(lock_error(&mut second, &file(&hard)).contains("in use by"));
}

#[test]
fn the_record_of_an_ended_process_does_not_lock() {
    let folder = Folder::new("stale");
    let path = folder.0.join("one");
    fs::write(&path, "x").unwrap();
    for key in lock_keys(&path, &HostInfo::default()) {
        fs::write(folder.0.join(format!("device-{key}")), "{\"pid\":1,\"started\":\"1\",\"program\":\"x\"}")
            .unwrap();
    }
    DeviceLocks::new(&folder.0).lock(&file(&path), &HostInfo::default()).unwrap();
}

#[test]
fn only_records_of_ended_processes_are_removed() {
    let folder = Folder::new("left");
    let (path, records) = (folder.0.join("one"), folder.0.join("r"));
    fs::write(&path, "x").unwrap();
    let mut locks = DeviceLocks::new(&records);
    locks.lock(&file(&path), &HostInfo::default()).unwrap();
    let count = || fs::read_dir(&records).unwrap().count();
    let of_ours = count();
    fs::write(records.join("device-block-7:0"), "").unwrap();
    remove_stale_records(&records);
    assert_eq!(count(), of_ours);
    assert!(DeviceLocks::new(&records).lock(&file(&path), &HostInfo::default()).is_err());
}

#[test]
fn a_lock_of_another_program_is_waited_for() {
    let folder = Folder::new("shared");
    let path = folder.0.join("one");
    fs::write(&path, "x").unwrap();
    let other = File::open(&path).unwrap();
    flock(&other, FlockOperation::LockShared).unwrap();
    let probing = std::thread::spawn(move || {
        std::thread::sleep(POLL_INTERVAL * 3);
        drop(other);
    });
    DeviceLocks::new(&folder.0.join("r")).lock(&file(&path), &HostInfo::default()).unwrap();
    probing.join().unwrap();
}

#[test]
fn closed_nodes_can_be_locked_by_the_bdev_layer() {
    let folder = Folder::new("closed");
    let (path, records) = (folder.0.join("one"), folder.0.join("r"));
    fs::write(&path, "x").unwrap();
    let host = HostInfo::default();
    let mut locks = DeviceLocks::new(&records);
    locks.lock(&file(&path), &host).unwrap();
    let layer = File::open(&path).unwrap();
    assert!(!try_lock(&layer).unwrap());
    locks.close_nodes();
    assert!(try_lock(&layer).unwrap());
    let message = lock_error(&mut DeviceLocks::new(&records), &file(&path));
    assert!(message.contains("in use by"), "the record stays: {message}");
    drop(layer);
    locks.reopen_nodes(&[file(&path), device(DeviceKind::Uri, format!("uring:{}", path.display()))]).unwrap();
    assert!(!try_lock(&File::open(&path).unwrap()).unwrap());
}

#[test]
fn a_file_stays_locked_while_a_process_shares_its_lock() {
    let folder = Folder::new("files");
    let (path, records) = (folder.0.join("one"), folder.0.join("r"));
    fs::write(&path, "x").unwrap();
    let mut locks = DeviceLocks::new(&records);
    locks.lock(&file(&path), &HostInfo::default()).unwrap();
    // A directory stands for a block device, which needs root: only regular files are shared.
    locks.lock_node(folder.0.clone()).unwrap();
    let shared = locks.files().unwrap();
    assert!(shared.iter().all(|file| is_same_file(file, &path)) && shared.len() == 1);
    assert!(try_lock(&shared[0]).unwrap(), "it has the lock");
    drop(locks);
    assert!(!try_lock(&File::open(&path).unwrap()).unwrap());
    assert!(try_lock(&File::open(&folder.0).unwrap()).unwrap());
    drop(shared);
    assert!(try_lock(&File::open(&path).unwrap()).unwrap());
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
    let host = HostInfo::with_root(&folder.0);
    assert_eq!(whole_disk("8:1", &host), "8:0");
    assert_eq!(whole_disk("8:0", &host), "8:0");
    assert_eq!(whole_disk("9:9", &host), "9:9");
}

#[test]
fn bdevs_that_two_runs_would_share_are_locked() {
    let folder = Folder::new("uri");
    let host = HostInfo::default();
    let (mut first, mut second) = (DeviceLocks::new(&folder.0), DeviceLocks::new(&folder.0));
    for location in ["null:1g", "malloc:64m", "model:samsung-980-pro"] {
        first.lock(&device(DeviceKind::Uri, location), &host).unwrap();
        second.lock(&device(DeviceKind::Uri, location), &host).unwrap();
    }
    let path = folder.0.join("one");
    fs::write(&path, "x").unwrap();
    for location in ["nvme+pcie://0000:01:00.0?ns=1".to_string(), format!("uring:{}", path.display())] {
        first.lock(&device(DeviceKind::Uri, location.clone()), &host).unwrap();
        assert!(lock_error(&mut second, &device(DeviceKind::Uri, location)).contains("in use by"));
    }
    assert!(lock_error(&mut second, &file(&path)).contains("in use by"));
}
