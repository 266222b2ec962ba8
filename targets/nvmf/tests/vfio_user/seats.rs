//! Several clients at one endpoint, which serves one at a time.

use std::io::Read;
use std::time::Duration;

use wire_vfio_user::{Header, ProtocolCapabilities, VersionMessage, VfioUserCommand};

use crate::host::VfioUserTestHost;
use crate::raw_client::RawVfioUserClient;
use crate::test_target::VfioUserTestTarget;

#[test]
fn a_silent_client_leaves_to_one_that_waits() {
    let rig = VfioUserTestTarget::new();
    let silent = RawVfioUserClient::negotiated(&rig);
    // Both wait; the first of them is served when the silent one had its time.
    let mut host = VfioUserTestHost::attach(&rig.socket());
    host.enable();
    let mut end = [0; 1];
    assert_eq!((&silent.0).read(&mut end).unwrap(), 0, "it is disconnected");
    // One that uses its controller stays, however long another waits.
    let waiting = RawVfioUserClient::connect(&rig);
    waiting.0.set_read_timeout(Some(Duration::from_secs(6))).unwrap();
    assert!((&waiting.0).read(&mut end).is_err());
    assert_eq!(host.identify(1, 0).len(), 4096);
}

#[test]
fn a_silent_client_stays_if_no_other_waits() {
    let rig = VfioUserTestTarget::new();
    let mut raw = RawVfioUserClient::negotiated(&rig);
    std::thread::sleep(Duration::from_millis(5500));
    assert_eq!(raw.errno(VfioUserCommand::DeviceReset, &[], &[]), 0);
}

#[test]
fn clients_that_wait_are_served_in_order_and_make_room_for_newer_ones() {
    let rig = VfioUserTestTarget::new();
    let host = VfioUserTestHost::connect(&rig.directory);
    let gone = RawVfioUserClient::connect(&rig);
    let mut next = RawVfioUserClient::connect(&rig);
    let version = VersionMessage { major: 0, minor: 1, capabilities: ProtocolCapabilities::default() };
    let request = Header::request(1, VfioUserCommand::Version, version.to_bytes().len());
    next.send(&request, &version.to_bytes(), &[]);
    let flood: Vec<RawVfioUserClient> = (0..300).map(|_| RawVfioUserClient::connect(&rig)).collect();
    // Of the newest of 300, 256 at most wait. The client that is served does not notice.
    host.client.read_u32(vfio_user::BAR0, 0).unwrap();
    drop(flood);
    drop(gone);
    assert!(next.is_closed(), "the oldest made room");
    let mut next = RawVfioUserClient::connect(&rig);
    next.send(&request, &version.to_bytes(), &[]);
    drop(host);
    assert!(!next.reply().unwrap().0.failed);
}
