use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use reservations::{ChangeWaker, Registrant, ReservationCommand, ReservationError};

use super::*;

const DEVICE: Uuid = Uuid::from_bytes([0xd; 16]);
const OTHER: Uuid = Uuid::from_bytes([0xe; 16]);

#[derive(Debug, Default)]
struct CountingWaker(AtomicUsize);

impl ChangeWaker for CountingWaker {
    fn wake(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

/// Registers a host so that it persists, and waits for the outcome.
fn register(lease: &ReservationLease, id: u8) -> Result<(), ReservationError> {
    let waker = Arc::new(CountingWaker::default());
    let command = ReservationCommand::Register { key: 1, persist: Some(true) };
    let change = lease.reservations().execute(&Registrant::nvme_host([id; 16]), command, waker.clone());
    let start = Instant::now();
    while waker.0.load(Ordering::Acquire) == 0 {
        assert!(start.elapsed() < Duration::from_secs(30), "no outcome");
        std::thread::yield_now();
    }
    change.outcome().unwrap()
}

fn registrants(lease: &ReservationLease) -> usize {
    lease.reservations().state().registrations.len()
}

/// An empty directory of a test.
struct TestDirectory(PathBuf);

impl TestDirectory {
    fn new(name: &str) -> TestDirectory {
        let path = std::env::temp_dir().join(format!("ringbolt-reservations-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        TestDirectory(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn state_in_the_file_outlives_the_leases() {
    let directory = TestDirectory::new("persist");
    let path = directory.file("one");
    let table = Arc::<ReservationTable>::default();
    let lease = table.open(DEVICE, Some(&path)).unwrap();
    assert_eq!(register(&lease, 1), Ok(()));
    assert_eq!(registrants(&lease), 1);
    drop(lease);
    // A save that was queued before is done before the file is read.
    for id in 2..20 {
        let lease = table.open(DEVICE, Some(&path)).unwrap();
        assert_eq!(registrants(&lease), usize::from(id) - 1);
        let command = ReservationCommand::Register { key: 1, persist: Some(true) };
        let host = Registrant::nvme_host([id; 16]);
        lease.reservations().execute(&host, command, Arc::new(CountingWaker::default()));
    }
    drop(table.open(DEVICE, Some(&path)).unwrap());
    // Another process.
    let table = Arc::<ReservationTable>::default();
    assert_eq!(registrants(&table.open(DEVICE, Some(&path)).unwrap()), 19);
}

#[test]
fn users_of_a_device_share_its_reservations() {
    let directory = TestDirectory::new("share");
    let (path, second) = (directory.file("one"), directory.file("two"));
    let table = Arc::<ReservationTable>::default();
    let lease = table.open(DEVICE, Some(&path)).unwrap();
    for path in [Some(&path), None] {
        let shared = table.open(DEVICE, path.map(PathBuf::as_path)).unwrap();
        assert!(Arc::ptr_eq(shared.reservations(), lease.reservations()));
    }
    let message = |device, path: &Path| table.open(device, Some(path)).unwrap_err().to_string();
    assert!(message(DEVICE, &second).contains("one"), "one file a device");
    assert!(message(OTHER, &path).contains("holds the reservations of device 0d0d"), "one device a file");
    drop(lease);
    let lease = table.open(DEVICE, None).unwrap();
    assert!(!lease.reservations().can_persist());
    assert!(message(DEVICE, &path).ends_with("are in memory"));
    // Nothing is left of it.
    drop(lease);
    drop(table.open(DEVICE, Some(&second)).unwrap());
    assert!(sync::lock(&table.0).devices.is_empty());
}

#[test]
fn unusable_files_are_refused_and_unchanged() {
    let directory = TestDirectory::new("refuse");
    let path = directory.file("one");
    let table = Arc::<ReservationTable>::default();
    for content in ["", "{\"ptpl\":true,\"rtype\":1", "not ours", "{}"] {
        std::fs::write(&path, content).unwrap();
        let error = table.open(DEVICE, Some(&path)).unwrap_err();
        assert!(matches!(error, OpenReservationsError::Content(..)), "{error}");
        assert_eq!(error.to_string().lines().count(), 1, "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
    }
    for path in [directory.0.as_path(), Path::new("/dev/zero"), &directory.file("nowhere/file")] {
        let error = table.open(DEVICE, Some(path)).unwrap_err();
        assert!(matches!(error, OpenReservationsError::Io(..)), "{error}");
    }
    // A leftover of a killed writer is ignored.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(directory.file("one.new"), "{\"ptpl").unwrap();
    drop(table.open(DEVICE, Some(&path)).unwrap());
    assert_eq!(decode_file(&std::fs::read(&path).unwrap(), DEVICE), Ok(ReservationState::default()));
    assert!(!directory.file("one.new").exists());
}

#[test]
fn a_file_that_blocks_keeps_only_its_own_device_waiting() {
    let directory = TestDirectory::new("block");
    let path = directory.file("one");
    // The temporary file is a FIFO: opening it for writing waits for a reader.
    let (fifo, mode) = (directory.file("one.new"), rustix::fs::Mode::from_raw_mode(0o600));
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let table = Arc::<ReservationTable>::default();
    std::thread::scope(|scope| {
        let blocked = scope.spawn(|| table.open(DEVICE, Some(&path)));
        while sync::lock(&table.0).devices.is_empty() {
            std::thread::yield_now();
        }
        let busy = table.open(DEVICE, None).unwrap_err();
        assert!(busy.to_string().contains("are being opened"), "{busy}");
        drop(table.open(OTHER, None).unwrap());
        // Reading ends it: a FIFO cannot be synced.
        std::fs::read(&fifo).unwrap();
        assert!(matches!(blocked.join().unwrap(), Err(OpenReservationsError::Io(..))));
    });
    std::fs::remove_file(&fifo).unwrap();
    drop(table.open(DEVICE, Some(&path)).unwrap());
}
