//! Resets, shutdowns, departures, and what follows them.

use std::os::unix::fs::PermissionsExt;

use nvmf::Fault;
use ring::Status;
use vfio_user::{BAR0, CONFIG, Client, ClientError};
use wire_nvme::opcode::{AdminOpcode, NvmOpcode};
use wire_nvme::registers::offset;
use wire_nvme::{Sqe, admin};

use crate::host::{DATA, Host, IOVA, MEMORY, Queue, prp, transfer};
use crate::rig::{NQN, Rig};

/// Half a second for a block, so that commands are surely under way.
const SLOW_US: u64 = 500_000;

/// A second namespace that takes its time.
fn slow(rig: &Rig) {
    bdev::malloc::create(&rig.registry, bdev::malloc::MallocConfig::new("Slow", 2048, 512)).unwrap();
    let config = bdev::delay::DelayConfig::new("Slow", "Delay0", SLOW_US);
    bdev::delay::create(&rig.registry, config).unwrap();
    rig.target.add_namespace(NQN, nvmf::NamespaceConfig::new("Delay0")).unwrap();
}

fn slow_read(cid: u16) -> Sqe {
    Sqe { nsid: 2, cid, ..transfer(NvmOpcode::Read, 0, 8, IOVA + DATA, 0) }
}

#[test]
fn a_controller_that_was_disabled_begins_anew() {
    let rig = Rig::new();
    let mut host = Host::connect(&rig.directory);
    for _ in 0..3 {
        let mut queue = host.queue(1, 16);
        let read = transfer(NvmOpcode::Read, 0, 1, IOVA + DATA, 0);
        assert_eq!(host.run(&mut queue, read).status, Status::SUCCESS);
        host.write(offset::CC, 0x0046_0000);
        host.wait_status(1, 0);
        // Registers of the admin queue stay, doorbells do not.
        assert_eq!(host.client.read_u64(BAR0, offset::ASQ.into()).unwrap(), IOVA);
        assert_eq!(host.mapped().load_u32(8), 0);
        host.enable();
    }
}

#[test]
fn a_reset_waits_for_devices_and_answers_nothing() {
    let rig = Rig::new();
    slow(&rig);
    let mut host = Host::connect(&rig.directory);
    let mut queue = host.queue(1, 16);
    host.put(&mut queue, &slow_read(7));
    host.ring(&queue);
    // It has been fetched when the command behind it on the admin queue is answered.
    host.identify(1, 0);
    host.write(offset::CC, 0x0046_0000);
    host.wait_status(1, 0);
    assert!(host.poll(&mut queue).is_none(), "a command that a reset has aborted is not answered");
    host.enable();
    let mut queue = host.queue(1, 16);
    assert_eq!(host.run(&mut queue, slow_read(8)).status, Status::SUCCESS);
}

#[test]
fn a_shutdown_is_complete_when_queues_are_gone() {
    let rig = Rig::new();
    let mut host = Host::connect(&rig.directory);
    let mut queue = host.queue(1, 16);
    let read = transfer(NvmOpcode::Read, 0, 1, IOVA + DATA, 0);
    assert_eq!(host.run(&mut queue, read).status, Status::SUCCESS);
    host.write(offset::CC, 0x0046_4001);
    host.wait_status(0xc, 0x8);
    host.write(offset::CC, 0x0046_0000);
    host.wait_status(0xd, 0);
    host.enable();
}

/// A host with five reads on a queue, which the device has taken.
fn under_way(rig: &Rig) -> (Host, Queue) {
    slow(rig);
    let mut host = Host::connect(&rig.directory);
    let mut queue = host.queue(1, 16);
    for cid in 0..5 {
        host.put(&mut queue, &slow_read(cid));
    }
    host.ring(&queue);
    // What comes after them is answered.
    host.identify(1, 0);
    (host, queue)
}

#[test]
fn a_queue_that_is_deleted_answers_what_it_took() {
    let rig = Rig::new();
    let (mut host, mut queue) = under_way(&rig);
    assert_eq!(host.delete(AdminOpcode::DeleteIoSq, 1), Status::SUCCESS);
    for _ in 0..5 {
        let cqe = host.poll(&mut queue).expect("answered before the deletion is");
        assert_eq!(cqe.status, Status::SUCCESS);
    }
    assert_eq!(host.delete(AdminOpcode::DeleteIoCq, 1), Status::SUCCESS);
}

#[test]
fn the_whole_function_is_reset_by_message_and_by_configuration_space() {
    let rig = Rig::new();
    slow(&rig);
    let mut host = Host::connect(&rig.directory);
    let resets: [fn(&Client); 2] = [
        |client| client.reset().unwrap(),
        // Initiate Function Level Reset, in Device Control of the PCI Express capability.
        |client| client.region_write(CONFIG, 0x68, &0x8000u16.to_le_bytes()).unwrap(),
    ];
    for reset in resets {
        let mut queue = host.queue(1, 16);
        host.put(&mut queue, &slow_read(1));
        host.ring(&queue);
        host.identify(1, 0);
        reset(&host.client);
        assert_eq!((host.read(offset::CC), host.read(offset::CSTS)), (0x0000_0000, 0));
        assert_eq!(host.read(offset::AQA), 0);
        assert!(host.poll(&mut queue).is_none());
        host.enable();
    }
}

#[test]
fn memory_is_given_back_when_devices_are_done_with_it() {
    let rig = Rig::new();
    slow(&rig);
    let mut host = Host::connect(&rig.directory);
    let mut queue = host.queue(1, 16);
    let other = crate::host::memory_file(MEMORY);
    let address = IOVA + 2 * MEMORY;
    use std::os::fd::AsFd;
    host.client.dma_map_file(address, other.as_fd(), 0, MEMORY, true).unwrap();
    let read = Sqe { cid: 3, nsid: 2, ..transfer(NvmOpcode::Read, 0, 8, address, 0) };
    host.put(&mut queue, &read);
    host.ring(&queue);
    host.identify(1, 0);
    host.client.dma_unmap(address, MEMORY).unwrap();
    // The answer to that came after the device was done.
    let cqe = host.wait(&mut queue);
    assert_eq!((cqe.cid, cqe.status), (3, Status::SUCCESS));
    let late = transfer(NvmOpcode::Read, 0, 8, address, 0);
    assert_eq!(host.run(&mut queue, late).status, Status::DATA_TRANSFER_ERROR);
}

#[test]
fn a_queue_whose_memory_comes_back_goes_on() {
    let rig = Rig::new();
    let mut host = Host::connect(&rig.directory);
    let mut queue = host.queue(1, 16);
    use std::os::fd::AsFd;
    host.client.dma_unmap(IOVA, MEMORY).unwrap();
    let read = Sqe { cid: 4, ..transfer(NvmOpcode::Read, 0, 8, IOVA + DATA, 0) };
    host.put(&mut queue, &read);
    host.ring(&queue);
    assert_eq!(host.read(offset::CSTS), 1);
    assert!(host.poll(&mut queue).is_none());
    host.client.dma_map_file(IOVA, host.file.as_fd(), 0, MEMORY, true).unwrap();
    assert_eq!(host.wait(&mut queue).cid, 4);
}

#[test]
fn the_next_client_is_let_in_when_the_last_is_gone() {
    let rig = Rig::new();
    slow(&rig);
    let mode = std::fs::metadata(rig.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    for _ in 0..3 {
        let mut host = Host::connect(&rig.directory);
        let mut queue = host.queue(1, 16);
        for cid in 0..8 {
            host.put(&mut queue, &slow_read(cid));
        }
        host.ring(&queue);
        host.identify(1, 0);
        // It goes without a word, with commands at the device.
        drop(host);
    }
    let mut host = Host::connect(&rig.directory);
    assert_eq!(rig.target.controllers(NQN).unwrap().len(), 1);
    host.identify(1, 0);
    // A second one waits, and gives up.
    let config = vfio_user::Config { timeout: std::time::Duration::from_millis(200) };
    assert!(matches!(Client::connect(&rig.directory, &config), Err(ClientError::Timeout(..))));
    host.identify(1, 0);
}

#[test]
fn clients_of_what_is_removed_are_disconnected() {
    let rig = Rig::new();
    let host = Host::connect(&rig.directory);
    rig.target.remove_listener(NQN, rig.address()).unwrap();
    assert!(!rig.socket().exists());
    assert!(matches!(host.client.read_u32(BAR0, 0), Err(ClientError::Gone)));
    rig.target.add_listener(NQN, rig.address()).unwrap();
    let host = Host::connect(&rig.directory);
    rig.target.delete_subsystem(NQN).unwrap();
    assert!(matches!(host.client.read_u32(BAR0, 0), Err(ClientError::Gone)));
    assert!(!rig.socket().exists());
}

#[test]
fn commands_of_what_is_removed_are_answered_first() {
    let removals: [fn(&Rig); 3] = [
        |rig| rig.target.remove_listener(NQN, rig.address()).unwrap(),
        |rig| rig.target.allow_any_host(NQN, false).unwrap(),
        |rig| rig.target.delete_subsystem(NQN).unwrap(),
    ];
    for remove in removals {
        let rig = Rig::new();
        let (host, mut queue) = under_way(&rig);
        remove(&rig);
        // What comes now is too late.
        host.put(&mut queue, &slow_read(5));
        host.ring(&queue);
        for _ in 0..5 {
            assert_eq!(host.wait(&mut queue).status, Status::SUCCESS);
        }
        while host.client.read_u32(BAR0, 0).is_ok() {}
        assert!(host.poll(&mut queue).is_none());
    }
}

#[test]
fn a_host_that_may_not_is_turned_away() {
    let rig = Rig::new();
    rig.target.allow_any_host(NQN, false).unwrap();
    let config = vfio_user::Config { timeout: std::time::Duration::from_secs(5) };
    assert!(matches!(Client::connect(&rig.directory, &config), Err(ClientError::Gone)));
    rig.target.allow_any_host(NQN, true).unwrap();
    let host = Host::connect(&rig.directory);
    rig.target.allow_any_host(NQN, false).unwrap();
    assert!(matches!(host.client.read_u32(BAR0, 0), Err(ClientError::Gone)));
}

#[test]
fn a_directory_that_is_in_use_is_refused_and_a_stale_socket_is_not() {
    let rig = Rig::new();
    assert!(rig.target.add_listener(NQN, rig.address()).is_err());
    rig.target.remove_listener(NQN, rig.address()).unwrap();
    // What a process that was killed leaves behind.
    drop(std::os::unix::net::UnixListener::bind(rig.socket()).unwrap());
    assert!(rig.socket().exists());
    rig.target.add_listener(NQN, rig.address()).unwrap();
    drop(Host::connect(&rig.directory));
    rig.target.remove_listener(NQN, rig.address()).unwrap();
    // Another's socket, and a file.
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
fn faults_are_injected() {
    let rig = Rig::new();
    let traddr = rig.directory.to_str().unwrap().to_owned();
    let inject = |fault| rig.target.inject(&traddr, fault).unwrap();
    assert!(rig.target.inject(&traddr, Fault::Fatal).is_err(), "nobody is connected");
    let mut host = Host::connect(&rig.directory);
    let mut queue = host.queue(1, 16);
    let read = |cid| Sqe { cid, ..transfer(NvmOpcode::Read, 0, 8, IOVA + DATA, 0) };
    // Two answers are lost, the third is not.
    inject(Fault::DropCompletions(2));
    for cid in 0..3 {
        host.put(&mut queue, &read(cid));
        host.ring(&queue);
    }
    assert_eq!(host.wait(&mut queue).cid, 2);
    // A queue stands still, the others go on.
    inject(Fault::Stall(1));
    host.put(&mut queue, &read(9));
    host.ring(&queue);
    host.identify(1, 0);
    assert!(host.poll(&mut queue).is_none());
    inject(Fault::None);
    assert_eq!(host.wait(&mut queue).cid, 9);
    inject(Fault::Fatal);
    host.wait_status(2, 2);
    host.write(offset::CC, 0);
    host.wait_status(3, 0);
    host.enable();
    inject(Fault::Gone);
    assert_eq!(host.read(offset::CSTS), 0xffff_ffff);
    let mut idle = std::mem::replace(&mut host.admin, Queue::nothing());
    host.put(&mut idle, &prp(admin::Identify { cns: 1, ..Default::default() }.to_sqe(0), IOVA + DATA, 0));
    host.ring(&idle);
    assert_eq!(host.read(offset::VS), 0xffff_ffff);
    assert!(host.poll(&mut idle).is_none());
    inject(Fault::Disconnect);
    assert!(matches!(host.client.read_u32(BAR0, 0), Err(ClientError::Gone)));
    drop(host);
    Host::connect(&rig.directory);
}
