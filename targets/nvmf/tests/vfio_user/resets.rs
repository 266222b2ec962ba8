//! Resets, shutdowns, disconnects and removals.

use std::os::unix::fs::PermissionsExt;

use block_io::Status;
use nvmf::VfioUserFault;
use vfio_user::{BAR0, CONFIG, VfioUserClient, VfioUserError};
use wire_nvme::opcode::{AdminOpcode, NvmOpcode};
use wire_nvme::registers::{ControllerCapabilities, ControllerStatus, SUBSYSTEM_RESET, offset};
use wire_nvme::{Sqe, admin};

use crate::host::{DATA, HostQueuePair, IOVA, MEMORY, VfioUserTestHost, prp, transfer};
use crate::test_target::{NQN, VfioUserTestTarget};

/// Half a second per command, so that commands are certainly in flight.
const SLOW_US: u64 = 500_000;

/// Adds a slow second namespace.
fn add_slow_namespace(rig: &VfioUserTestTarget) {
    bdev::malloc::create(&rig.registry, bdev::malloc::MallocConfig::new("Slow", 2048, 512)).unwrap();
    let config = bdev::delay::DelayConfig::new("Slow", "Delay0", SLOW_US);
    bdev::delay::create(&rig.registry, config).unwrap();
    rig.target.add_namespace(NQN, nvmf::NamespaceConfig::new("Delay0")).unwrap();
}

fn slow_read(cid: u16) -> Sqe {
    Sqe { nsid: 2, cid, ..transfer(NvmOpcode::Read, 0, 8, IOVA + DATA, 0) }
}

#[test]
fn a_disabled_controller_can_be_enabled_again() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    for _ in 0..3 {
        let mut queue = host.create_queue_pair(1, 16);
        let read = transfer(NvmOpcode::Read, 0, 1, IOVA + DATA, 0);
        assert_eq!(host.execute(&mut queue, read).status, Status::SUCCESS);
        host.write(offset::CC, 0x0046_0000);
        host.wait_status(1, 0);
        // The admin queue registers are preserved, the doorbells are reset.
        assert_eq!(host.client.read_u64(BAR0, offset::ASQ.into()).unwrap(), IOVA);
        assert_eq!(host.mapped_doorbells().load_u32(8), 0);
        host.enable();
    }
}

#[test]
fn a_controller_reset_posts_no_completions_for_aborted_commands() {
    let rig = VfioUserTestTarget::new();
    add_slow_namespace(&rig);
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 16);
    host.push_sqe(&mut queue, &slow_read(7));
    host.ring_doorbell(&queue);
    // It has been fetched when a later admin command completes.
    host.identify(1, 0);
    host.write(offset::CC, 0x0046_0000);
    host.wait_status(1, 0);
    assert!(host.poll(&mut queue).is_none(), "a command aborted by a reset has no completion");
    host.enable();
    let mut queue = host.create_queue_pair(1, 16);
    assert_eq!(host.execute(&mut queue, slow_read(8)).status, Status::SUCCESS);
}

#[test]
fn a_subsystem_reset_closes_the_queues_and_is_reported_until_the_host_clears_it() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 16);
    let read = transfer(NvmOpcode::Read, 0, 1, IOVA + DATA, 0);
    assert_eq!(host.execute(&mut queue, read).status, Status::SUCCESS);
    assert!(ControllerCapabilities::decode(host.client.read_u64(BAR0, 0).unwrap()).subsystem_reset);
    host.write(offset::NSSR, 1);
    host.wait_status(1, 1);
    host.write(offset::NSSR, SUBSYSTEM_RESET);
    host.wait_status(1, 0);
    assert_eq!((host.read(offset::CSTS), host.read(offset::CC)), (ControllerStatus::NSSRO, 0));
    host.enable();
    assert_eq!(host.read(offset::CSTS), ControllerStatus::NSSRO | 1);
    host.write(offset::CSTS, ControllerStatus::NSSRO);
    assert_eq!(host.read(offset::CSTS), 1);
    let mut queue = host.create_queue_pair(1, 16);
    assert_eq!(host.execute(&mut queue, read).status, Status::SUCCESS);
}

#[test]
fn a_normal_shutdown_completes() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 16);
    let read = transfer(NvmOpcode::Read, 0, 1, IOVA + DATA, 0);
    assert_eq!(host.execute(&mut queue, read).status, Status::SUCCESS);
    host.write(offset::CC, 0x0046_4001);
    host.wait_status(0xc, 0x8);
    host.write(offset::CC, 0x0046_0000);
    host.wait_status(0xd, 0);
    host.enable();
}

/// A host with five reads in flight at the slow device.
fn with_reads_in_flight(rig: &VfioUserTestTarget) -> (VfioUserTestHost, HostQueuePair) {
    add_slow_namespace(rig);
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 16);
    for cid in 0..5 {
        host.push_sqe(&mut queue, &slow_read(cid));
    }
    host.ring_doorbell(&queue);
    // The reads have been fetched when a later admin command completes.
    host.identify(1, 0);
    (host, queue)
}

#[test]
fn commands_complete_before_the_deletion_of_their_queue() {
    let rig = VfioUserTestTarget::new();
    let (mut host, mut queue) = with_reads_in_flight(&rig);
    assert_eq!(host.delete(AdminOpcode::DeleteIoSq, 1), Status::SUCCESS);
    for _ in 0..5 {
        let cqe = host.poll(&mut queue).expect("it completes before the deletion");
        assert_eq!(cqe.status, Status::SUCCESS);
    }
    assert_eq!(host.delete(AdminOpcode::DeleteIoCq, 1), Status::SUCCESS);
}

#[test]
fn function_resets_by_device_reset_message_and_by_flr() {
    let rig = VfioUserTestTarget::new();
    add_slow_namespace(&rig);
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let resets: [fn(&VfioUserClient); 2] = [
        |client| client.reset().unwrap(),
        // Initiate Function Level Reset, in Device Control of the PCI Express capability.
        |client| client.region_write(CONFIG, 0x68, &0x8000u16.to_le_bytes()).unwrap(),
    ];
    for reset in resets {
        let mut queue = host.create_queue_pair(1, 16);
        host.push_sqe(&mut queue, &slow_read(1));
        host.ring_doorbell(&queue);
        host.identify(1, 0);
        reset(&host.client);
        assert_eq!((host.read(offset::CC), host.read(offset::CSTS)), (0x0000_0000, 0));
        assert_eq!(host.read(offset::AQA), 0);
        assert!(host.poll(&mut queue).is_none());
        host.enable();
    }
}

#[test]
fn dma_unmap_waits_for_outstanding_device_requests() {
    let rig = VfioUserTestTarget::new();
    add_slow_namespace(&rig);
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 16);
    let other = crate::host::memory_file(MEMORY);
    let address = IOVA + 2 * MEMORY;
    use std::os::fd::AsFd;
    host.client.dma_map_file(address, other.as_fd(), 0, MEMORY, true).unwrap();
    let read = Sqe { cid: 3, nsid: 2, ..transfer(NvmOpcode::Read, 0, 8, address, 0) };
    host.push_sqe(&mut queue, &read);
    host.ring_doorbell(&queue);
    host.identify(1, 0);
    host.client.dma_unmap(address, MEMORY).unwrap();
    // The reply to the unmap came after the device had completed the read.
    let cqe = host.wait(&mut queue);
    assert_eq!((cqe.cid, cqe.status), (3, Status::SUCCESS));
    let late = transfer(NvmOpcode::Read, 0, 8, address, 0);
    assert_eq!(host.execute(&mut queue, late).status, Status::DATA_TRANSFER_ERROR);
}

#[test]
fn a_queue_continues_when_its_memory_is_mapped_again() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 16);
    use std::os::fd::AsFd;
    host.client.dma_unmap(IOVA, MEMORY).unwrap();
    let read = Sqe { cid: 4, ..transfer(NvmOpcode::Read, 0, 8, IOVA + DATA, 0) };
    host.push_sqe(&mut queue, &read);
    host.ring_doorbell(&queue);
    assert_eq!(host.read(offset::CSTS), 1);
    assert!(host.poll(&mut queue).is_none());
    host.client.dma_map_file(IOVA, host.file.as_fd(), 0, MEMORY, true).unwrap();
    assert_eq!(host.wait(&mut queue).cid, 4);
}

#[test]
fn the_next_client_is_accepted_after_the_last_disconnects() {
    let rig = VfioUserTestTarget::new();
    add_slow_namespace(&rig);
    let mode = std::fs::metadata(rig.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    for _ in 0..3 {
        let mut host = VfioUserTestHost::connect(&rig.directory);
        let mut queue = host.create_queue_pair(1, 16);
        for cid in 0..8 {
            host.push_sqe(&mut queue, &slow_read(cid));
        }
        host.ring_doorbell(&queue);
        host.identify(1, 0);
        // It disconnects with commands in flight.
        drop(host);
    }
    let mut host = VfioUserTestHost::connect(&rig.directory);
    assert_eq!(rig.target.controllers(NQN).unwrap().len(), 1);
    host.identify(1, 0);
    // A second client waits and times out.
    let config =
        vfio_user::ClientConfig { timeout: std::time::Duration::from_millis(200), ..Default::default() };
    assert!(matches!(VfioUserClient::connect(&rig.directory, &config), Err(VfioUserError::Timeout(..))));
    host.identify(1, 0);
}

#[test]
fn removing_a_listener_or_subsystem_disconnects_clients() {
    let rig = VfioUserTestTarget::new();
    let host = VfioUserTestHost::connect(&rig.directory);
    rig.target.remove_listener(NQN, rig.address()).unwrap();
    assert!(!rig.socket().exists());
    assert!(matches!(host.client.read_u32(BAR0, 0), Err(VfioUserError::Disconnected)));
    rig.target.add_listener(NQN, rig.address()).unwrap();
    let host = VfioUserTestHost::connect(&rig.directory);
    rig.target.delete_subsystem(NQN).unwrap();
    assert!(matches!(host.client.read_u32(BAR0, 0), Err(VfioUserError::Disconnected)));
    assert!(!rig.socket().exists());
}

#[test]
fn commands_in_flight_complete_before_a_removal_disconnects() {
    let removals: [fn(&VfioUserTestTarget); 3] = [
        |rig| rig.target.remove_listener(NQN, rig.address()).unwrap(),
        |rig| rig.target.allow_any_host(NQN, false).unwrap(),
        |rig| drop(rig.target.delete_subsystem(NQN).unwrap()),
    ];
    for remove in removals {
        let rig = VfioUserTestTarget::new();
        let (host, mut queue) = with_reads_in_flight(&rig);
        remove(&rig);
        // This command is no longer fetched.
        host.push_sqe(&mut queue, &slow_read(5));
        host.ring_doorbell(&queue);
        for _ in 0..5 {
            assert_eq!(host.wait(&mut queue).status, Status::SUCCESS);
        }
        while host.client.read_u32(BAR0, 0).is_ok() {}
        assert!(host.poll(&mut queue).is_none());
    }
}

#[test]
fn a_host_that_is_not_allowed_is_disconnected() {
    let rig = VfioUserTestTarget::new();
    rig.target.allow_any_host(NQN, false).unwrap();
    let config = vfio_user::ClientConfig { timeout: std::time::Duration::from_secs(5), ..Default::default() };
    assert!(matches!(VfioUserClient::connect(&rig.directory, &config), Err(VfioUserError::Disconnected)));
    rig.target.allow_any_host(NQN, true).unwrap();
    let host = VfioUserTestHost::connect(&rig.directory);
    rig.target.allow_any_host(NQN, false).unwrap();
    // The reactor knows it now, and may answer before it closes the connection.
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !matches!(host.client.read_u32(BAR0, 0), Err(VfioUserError::Disconnected)) {
        assert!(std::time::Instant::now() < end, "the host is still connected");
    }
}

#[test]
fn a_directory_in_use_is_rejected_and_a_stale_socket_is_replaced() {
    let rig = VfioUserTestTarget::new();
    assert!(rig.target.add_listener(NQN, rig.address()).is_err());
    rig.target.remove_listener(NQN, rig.address()).unwrap();
    // The stale socket of a killed process.
    drop(std::os::unix::net::UnixListener::bind(rig.socket()).unwrap());
    assert!(rig.socket().exists());
    rig.target.add_listener(NQN, rig.address()).unwrap();
    drop(VfioUserTestHost::connect(&rig.directory));
    rig.target.remove_listener(NQN, rig.address()).unwrap();
    // Another process's socket, and a regular file.
    let other = std::os::unix::net::UnixListener::bind(rig.socket()).unwrap();
    assert!(rig.target.add_listener(NQN, rig.address()).is_err());
    drop(other);
    std::fs::remove_file(rig.socket()).unwrap();
    std::fs::write(rig.socket(), "a file").unwrap();
    assert!(rig.target.add_listener(NQN, rig.address()).is_err());
    std::fs::remove_file(rig.socket()).unwrap();
    let nowhere = nvmf::ListenAddress::vfio_user("/nonexistent");
    assert!(rig.target.add_listener(NQN, nowhere).is_err());
    let relative = nvmf::ListenAddress::vfio_user("here");
    assert!(rig.target.add_listener(NQN, relative).is_err());
}

#[test]
fn injected_faults_take_effect() {
    let rig = VfioUserTestTarget::new();
    let traddr = rig.directory.to_str().unwrap().to_owned();
    let inject = |fault| rig.target.inject(&traddr, fault).unwrap();
    assert!(rig.target.inject(&traddr, VfioUserFault::Fatal).is_err(), "no client is connected");
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 16);
    let read = |cid| Sqe { cid, ..transfer(NvmOpcode::Read, 0, 8, IOVA + DATA, 0) };
    // Two completions are dropped, the third is not.
    inject(VfioUserFault::DropCompletions(2));
    for cid in 0..3 {
        host.push_sqe(&mut queue, &read(cid));
        host.ring_doorbell(&queue);
    }
    assert_eq!(host.wait(&mut queue).cid, 2);
    // One queue is stalled, the others continue.
    inject(VfioUserFault::Stall(1));
    host.push_sqe(&mut queue, &read(9));
    host.ring_doorbell(&queue);
    host.identify(1, 0);
    assert!(host.poll(&mut queue).is_none());
    inject(VfioUserFault::None);
    assert_eq!(host.wait(&mut queue).cid, 9);
    inject(VfioUserFault::Fatal);
    host.wait_status(2, 2);
    host.write(offset::CC, 0);
    host.wait_status(3, 0);
    host.enable();
    inject(VfioUserFault::SurpriseRemoval);
    assert_eq!(host.read(offset::CSTS), 0xffff_ffff);
    let mut idle = std::mem::replace(&mut host.admin, HostQueuePair::placeholder());
    host.push_sqe(
        &mut idle,
        &prp(admin::Identify { cns: 1, ..Default::default() }.to_sqe(0), IOVA + DATA, 0),
    );
    host.ring_doorbell(&idle);
    assert_eq!(host.read(offset::VS), 0xffff_ffff);
    assert!(host.poll(&mut idle).is_none());
    inject(VfioUserFault::Disconnect);
    assert!(matches!(host.client.read_u32(BAR0, 0), Err(VfioUserError::Disconnected)));
    drop(host);
    VfioUserTestHost::connect(&rig.directory);
}
