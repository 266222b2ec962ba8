use reservations::{Registrant, Registration};

use super::*;

const DEVICE: Uuid = Uuid::from_bytes([0xd; 16]);

fn state() -> ReservationState {
    let registrations = vec![Registration { registrant: Registrant::nvme_host([1; 16]), key: 0xabc }];
    ReservationState { registrations, persistent: true, ..ReservationState::default() }
}

#[test]
fn a_file_is_replaced_atomically() {
    let path = std::env::temp_dir().join(format!("ringbolt-ptpl-{}", std::process::id()));
    assert_eq!(load(&path, DEVICE).unwrap(), ReservationState::default());
    // A leftover temporary file of a killed writer is ignored.
    let mut temporary = path.clone().into_os_string();
    temporary.push(".new");
    std::fs::write(&temporary, "{\"ptpl").unwrap();
    assert_eq!(load(&path, DEVICE).unwrap(), ReservationState::default());
    os::replace_file(&path, 0o666, &encode_file(&state(), DEVICE)).unwrap();
    assert!(!Path::new(&temporary).exists());
    assert_eq!(load(&path, DEVICE).unwrap(), state());
    std::fs::write(&path, &encode_file(&state(), DEVICE)[..100]).unwrap();
    let error = load(&path, DEVICE).unwrap_err().to_string();
    assert!(error.contains("does not hold reservations") && error.lines().count() == 1, "{error}");
    std::fs::remove_file(&path).unwrap();
}
