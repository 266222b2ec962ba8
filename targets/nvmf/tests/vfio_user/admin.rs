//! Registers, PCI configuration space, and admin commands.

use block_io::Status;
use nvmf::VfioUserConfig;
use vfio_user::{BAR0, CONFIG};
use wire_nvme::admin::{GetFeatures, GetLogPage, SetFeatures};
use wire_nvme::aer::AsyncEvent;
use wire_nvme::identify::{IdentifyController, IdentifyNamespace};
use wire_nvme::opcode::{AdminOpcode, NvmOpcode};
use wire_nvme::queue::{CreateIoCq, CreateIoSq};
use wire_nvme::registers::{ControllerCapabilities, offset};
use wire_nvme::{Sqe, feature};

use crate::host::{DATA, HostQueuePair, IOVA, VfioUserTestHost, prp};
use crate::test_target::{BLOCKS, NQN, VfioUserTestTarget};

#[test]
fn pci_configuration_and_registers_describe_an_nvme_controller() {
    let rig = VfioUserTestTarget::new();
    let host = VfioUserTestHost::attach(&rig.directory);
    let config = |at| host.client.read_u32(CONFIG, at).unwrap();
    assert_eq!(config(8) >> 8, 0x01_0802, "class code");
    assert_eq!(config(4) >> 20 & 1, 1, "capabilities");
    assert_eq!(config(0x10) & 0xf, 4, "a 64-bit memory region");
    let regions: Vec<u64> = host.client.regions().iter().map(|region| region.size).collect();
    assert_eq!(regions, [0x2000, 0, 0, 0, 4096, 4096, 0, 4096, 0]);
    let areas = &host.client.regions()[BAR0 as usize].areas;
    assert_eq!((areas[0].offset, areas[0].size), (0x1000, 0x1000));
    assert_eq!(host.client.msix_vectors(), 128);
    let capabilities = ControllerCapabilities::decode(host.client.read_u64(BAR0, 0).unwrap());
    assert_eq!((capabilities.queue_entries_max, capabilities.doorbell_stride_log2), (256, 0));
    assert!(capabilities.contiguous_queues_required && capabilities.nvm_command_set);
    assert_eq!(host.read(offset::VS), 0x0002_0000);
    assert_eq!(host.read(offset::CSTS), 0);
    // Partial register writes and unimplemented regions are rejected.
    assert!(host.client.region_write(BAR0, 0x14, &[1, 0]).is_err());
    assert!(host.client.region_write(BAR0, 0x16, &[1, 0, 0, 0]).is_err());
    assert!(host.client.region_read(2, 0, &mut [0; 4]).is_err());
}

#[test]
fn identify_reports_the_controller_and_its_namespace() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let page = host.identify(1, 0);
    let controller = IdentifyController::decode(page.first_chunk().unwrap()).unwrap();
    assert_eq!(controller.subnqn, NQN);
    // Fields of Fabrics controllers only (Base 2.0, section 5.17.2.1).
    assert_eq!((controller.io_command_capsule_bytes, controller.msdbd, controller.ofcs), (0, 0, 0));
    assert_eq!((controller.vid, controller.ssvid), (0x4e58, 0x4e58));
    assert_eq!((controller.sgls, controller.maxcmd, controller.kas_100ms), (0x1_0001, 0, 0));
    assert_eq!((controller.sqes, controller.cqes, controller.mdts), (0x66, 0x44, 5));
    let page = host.identify(0, 1);
    assert_eq!(IdentifyNamespace::decode(page.first_chunk().unwrap()).unwrap().nsze, BLOCKS);
    let page = host.identify(2, 0);
    assert_eq!(page[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    let controllers = rig.target.controllers(NQN).unwrap();
    assert_eq!(controllers.len(), 1);
    let qpairs = rig.target.qpairs(NQN).unwrap();
    let stats = rig.target.stats().unwrap();
    let opened = stats.totals.iter().map(|one| one.admin_queues + one.io_queues).sum::<u64>();
    assert_eq!(opened, qpairs.len() as u64, "{stats:?}");
    assert_eq!((qpairs.len(), qpairs[0].qid, qpairs[0].queue_depth, qpairs[0].commands), (1, 0, 32, 3));
    assert_eq!(qpairs[0].local, rig.address());
}

#[test]
fn data_pages_may_be_discontiguous() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    // 4 KiB that start in the middle of one page and end in another at a lower address.
    let identify = wire_nvme::admin::Identify { cns: 1, ..Default::default() };
    let cqe = host.admin(prp(identify.to_sqe(0), IOVA + DATA + 0x5c00, IOVA + DATA + 0x2000));
    assert_eq!(cqe.status, Status::SUCCESS);
    let (mut low, mut high) = (vec![0; 0x400], vec![0; 0xc00]);
    host.memory.read(DATA + 0x5c00, &mut low);
    host.memory.read(DATA + 0x2000, &mut high);
    let discontiguous = [low, high].concat();
    assert_eq!(discontiguous, host.identify(1, 0));
}

#[test]
fn interrupt_features_are_supported_and_keep_alive_is_not() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let get = |fid: feature::FeatureId, cdw11| {
        let command = GetFeatures { fid: fid.to_wire(), cdw11, ..Default::default() };
        prp(command.to_sqe(0), 0, 0)
    };
    let set = |fid: feature::FeatureId, cdw11| {
        let command = SetFeatures { fid: fid.to_wire(), cdw11, ..Default::default() };
        prp(command.to_sqe(0), 0, 0)
    };
    let cqe = host.admin(set(feature::FeatureId::NumberOfQueues, 0x0007_0003));
    assert_eq!((cqe.status, cqe.result), (Status::SUCCESS, 0x0007_0003));
    assert_eq!(host.admin(set(feature::FeatureId::InterruptCoalescing, 0x0504)).status, Status::SUCCESS);
    assert_eq!(host.admin(get(feature::FeatureId::InterruptCoalescing, 0)).result, 0x0504);
    assert_eq!(host.admin(get(feature::FeatureId::InterruptVector, 127)).result, 0x1_007f);
    let beyond = host.admin(get(feature::FeatureId::InterruptVector, 128));
    assert_eq!(beyond.status, Status::INVALID_FIELD.do_not_retry());
    let keep_alive = host.admin(get(feature::FeatureId::KeepAliveTimer, 0));
    assert_eq!((keep_alive.status, keep_alive.result), (Status::SUCCESS, 0));
    let timer = host.admin(set(feature::FeatureId::KeepAliveTimer, 5000));
    assert_eq!(timer.status, Status::FEATURE_NOT_CHANGEABLE.do_not_retry());
    let alive = host.admin(Sqe { flags: 0, ..Sqe::new(AdminOpcode::KeepAlive.to_wire()) });
    assert_eq!(alive.status, Status::INVALID_OPCODE.do_not_retry());
    // Fabrics commands are not supported, and admin commands require PRPs.
    let fabrics = host.admin(Sqe { flags: 0, ..Sqe::new(0x7f) });
    assert_eq!(fabrics.status, Status::INVALID_OPCODE.do_not_retry());
    let sgl = host.admin(Sqe { flags: Sqe::FLAGS_SGL, ..get(feature::FeatureId::Arbitration, 0) });
    assert_eq!(sgl.status, Status::INVALID_FIELD.do_not_retry());
}

#[test]
fn submission_queues_share_a_completion_queue() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let queues = feature::NumberOfQueues { submission: 3, completion: 1 };
    let fid = feature::FeatureId::NumberOfQueues.to_wire();
    let set = SetFeatures { fid, cdw11: queues.to_wire(), ..Default::default() };
    let granted = host.admin(prp(set.to_sqe(0), 0, 0));
    assert_eq!((granted.status, granted.result), (Status::SUCCESS, queues.to_wire().into()));
    let mut shared = host.create_queue_pair(1, 16);
    let beyond = CreateIoCq { address: IOVA, qid: 2, entries: 16, contiguous: true, ..Default::default() };
    let beyond = host.admin(beyond.to_sqe());
    assert_eq!(beyond.status, Status::INVALID_QUEUE_IDENTIFIER.do_not_retry());
    let mut others = [2, 3].map(|qid| host.create_submission_queue(qid, 16, 1));
    let flush = Sqe { nsid: 1, flags: 0, ..Sqe::new(NvmOpcode::Flush.to_wire()) };
    for queue in &mut others {
        host.push_sqe(queue, &Sqe { cid: queue.qid, ..flush });
        host.ring_doorbell(queue);
        let cqe = host.wait(&mut shared);
        assert_eq!((cqe.cid, cqe.sqid, cqe.status), (queue.qid, queue.qid, Status::SUCCESS));
    }
}

#[test]
fn queues_must_be_created_and_deleted_in_order() {
    let rig = VfioUserTestTarget::with(VfioUserConfig { max_queue_depth: 1024, ..VfioUserConfig::default() });
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let queue =
        CreateIoSq { address: IOVA + 0x1_0000, qid: 1, entries: 16, contiguous: true, priority: 0, cqid: 1 };
    assert_eq!(host.admin(queue.to_sqe()).status, nvme_controller::queues::COMPLETION_QUEUE_INVALID);
    host.create_queue_pair(1, 16);
    let twice = host.admin(queue.to_sqe()).status;
    assert_eq!(twice, Status::INVALID_QUEUE_IDENTIFIER.do_not_retry());
    let in_use = host.delete(AdminOpcode::DeleteIoCq, 1);
    assert_eq!(in_use, nvme_controller::queues::INVALID_QUEUE_DELETION);
    assert_eq!(host.delete(AdminOpcode::DeleteIoSq, 1), Status::SUCCESS);
    assert_eq!(host.delete(AdminOpcode::DeleteIoCq, 1), Status::SUCCESS);
    host.create_queue_pair(1, 16);
    let many = CreateIoCq {
        address: IOVA + 0x2_0000,
        qid: 2,
        entries: 1025,
        contiguous: true,
        ..Default::default()
    };
    assert_eq!(host.admin(many.to_sqe()).status, Status::INVALID_QUEUE_SIZE.do_not_retry());
    // Unmapped memory.
    let unmapped =
        CreateIoCq { address: 0x1000, qid: 2, entries: 16, contiguous: true, ..Default::default() };
    assert_eq!(host.admin(unmapped.to_sqe()).status, Status::DATA_TRANSFER_ERROR);
    // A queue that is only partly mapped.
    let end = IOVA + crate::host::MEMORY - 4096;
    let outside = CreateIoCq { address: end, entries: 512, ..unmapped };
    assert_eq!(host.admin(outside.to_sqe()).status, Status::DATA_TRANSFER_ERROR);
}

#[test]
fn adding_a_namespace_sends_a_namespace_attribute_changed_event() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let enable = SetFeatures {
        fid: feature::FeatureId::AsyncEventConfiguration.to_wire(),
        cdw11: 0x100,
        ..Default::default()
    };
    assert_eq!(host.admin(prp(enable.to_sqe(0), 0, 0)).status, Status::SUCCESS);
    let mut queue = std::mem::replace(&mut host.admin, HostQueuePair::placeholder());
    let request = Sqe { cid: 77, flags: 0, ..Sqe::new(AdminOpcode::AsyncEventRequest.to_wire()) };
    host.push_sqe(&mut queue, &request);
    host.ring_doorbell(&queue);
    bdev::malloc::create(&rig.registry, bdev::malloc::MallocConfig::new("Malloc1", 2048, 512)).unwrap();
    rig.target.add_namespace(NQN, nvmf::NamespaceConfig::new("Malloc1")).unwrap();
    let cqe = host.wait(&mut queue);
    assert_eq!((cqe.cid, cqe.status), (77, Status::SUCCESS));
    assert_eq!(AsyncEvent::from_result(cqe.result), Some(AsyncEvent::NAMESPACE_CHANGED));
    host.admin = queue;
    let page = GetLogPage { lid: 4, length_bytes: 4096, ..Default::default() };
    assert_eq!(host.admin(prp(page.to_sqe(0), IOVA + DATA, 0)).status, Status::SUCCESS);
    assert_eq!(host.memory.load_u32(DATA), 2);
}
