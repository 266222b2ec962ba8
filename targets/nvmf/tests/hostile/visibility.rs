//! What a host may know and change of namespaces: read-only ones, and those that only other hosts see.

use std::sync::Arc;

use bdev::malloc::{self, MallocConfig};
use bdev::{Bdev, BdevError, BdevGeometry, BoxedChannel, Durability, IoLimits, Registry};
use block_io::{Channel as _, Op, Request, Status, Tag};
use nvmf::NamespaceConfig;
use wire_nvme::admin::{GetLogPage, Identify};
use wire_nvme::identify::{IdentifyNamespace, NamespaceIndependent};
use wire_nvme::io::{
    COPY_RANGE_SIZE, CopyCommand, CopyRange, DSM_RANGE_SIZE, DatasetManagement, WriteUncorrectable,
    WriteZeroes,
};
use wire_nvme::log::{HealthLog, LogId};
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::{DataPointer, Sqe};

use crate::peer::{HOST, RawTcpHost, ReceivedPdu, on_host, pattern, write_in_capsule};
use crate::test_target::{NQN, TcpTestTarget};

/// A device in memory that supports every operation, and rejects writes.
struct ReadOnlyDisk(Arc<dyn Bdev>);

impl ReadOnlyDisk {
    fn register(registry: &Registry, name: &str) {
        let below = malloc::create(registry, MallocConfig::new(&format!("{name} below"), 1024, 512)).unwrap();
        registry.register(name, None, &[], Arc::new(ReadOnlyDisk(below.bdev().clone()))).unwrap();
    }
}

impl Bdev for ReadOnlyDisk {
    fn product_name(&self) -> &'static str {
        "Read-only disk"
    }

    fn geometry(&self) -> BdevGeometry {
        self.0.geometry()
    }

    fn durability(&self) -> Durability {
        self.0.durability()
    }

    fn supports(&self, op: Op) -> bool {
        self.0.supports(op)
    }

    fn open(&self, core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        self.0.open(core)
    }

    fn io_limits(&self) -> IoLimits {
        self.0.io_limits()
    }

    fn read_only(&self) -> bool {
        true
    }
}

/// Has the controller send this many bytes.
fn controller_data(admin: &mut RawTcpHost, sqe: Sqe, bytes: u32) -> Vec<u8> {
    admin.capsule(Sqe { cid: 12, data: DataPointer::transport(bytes), ..sqe }, &[]);
    let ReceivedPdu::Data(_, data) = admin.receive_pdu() else { panic!("no data") };
    assert_eq!(admin.expect_response().status, Status::SUCCESS);
    data
}

#[test]
fn a_read_only_namespace_says_so_and_rejects_whatever_changes_it() {
    let rig = TcpTestTarget::with_transport(Default::default());
    ReadOnlyDisk::register(&rig.registry, "Locked");
    assert_eq!(rig.target.add_namespace(NQN, NamespaceConfig::new("Locked")).unwrap(), 2);
    let mut admin = RawTcpHost::admin(&rig);
    let mut peer = RawTcpHost::io(&rig, &admin, 1, 16, false);
    for (nsid, nsattr) in [(1, 0), (2, 1)] {
        let identify = |cns| Identify { cns, ..Default::default() }.to_sqe(nsid);
        let namespace = controller_data(&mut admin, identify(0), 4096);
        let namespace = IdentifyNamespace::decode(namespace.as_slice().try_into().unwrap()).unwrap();
        let independent = controller_data(&mut admin, identify(8), 4096);
        let independent = NamespaceIndependent::decode(independent.as_slice().try_into().unwrap());
        assert_eq!((namespace.nsattr, independent.nsattr), (nsattr, nsattr), "namespace {nsid}");
    }
    let before = peer.read_back(2, 0, 4096).unwrap();
    let mut source = [0; COPY_RANGE_SIZE];
    CopyRange { lba: 8, blocks: 8, ..CopyRange::default() }.encode(&mut source);
    // A range is its attributes, its length and its first block (NVM 1.0, figure 42).
    let mut range = [0; DSM_RANGE_SIZE];
    range[4] = 8;
    let in_capsule = |data: &[u8], sqe: Sqe| {
        (Sqe { data: DataPointer::capsule(0, data.len() as u32), ..sqe }, data.to_vec())
    };
    let deallocate = DatasetManagement { ranges: 1, deallocate: true, ..DatasetManagement::default() };
    let copy = CopyCommand { lba: 0, ranges: 1, ..CopyCommand::default() };
    let data = pattern(4096, 1);
    let zeroes = |deallocate| WriteZeroes { blocks: 8, deallocate, ..WriteZeroes::default() }.to_sqe();
    let commands = [
        (write_in_capsule(2, 0, data.len()), data.clone()),
        (zeroes(false), vec![]),
        (zeroes(true), vec![]),
        in_capsule(&range, deallocate.to_sqe()),
        in_capsule(&source, copy.to_sqe()),
        (WriteUncorrectable { lba: 0, blocks: 8 }.to_sqe(), vec![]),
    ];
    for (sqe, data) in commands {
        let status = peer.command(Sqe { nsid: 2, cid: 3, ..sqe }, &data).status;
        assert_eq!(
            status,
            Status::NAMESPACE_WRITE_PROTECTED.do_not_retry(),
            "{:?}",
            NvmOpcode::from_wire(sqe.opcode)
        );
        // The other namespace has them.
        assert_eq!(peer.command(Sqe { nsid: 1, cid: 3, ..sqe }, &data).status, Status::SUCCESS);
    }
    // Hints change nothing.
    let (hint, data) = in_capsule(&range, DatasetManagement { deallocate: false, ..deallocate }.to_sqe());
    assert_eq!(peer.command(Sqe { nsid: 2, cid: 3, ..hint }, &data).status, Status::SUCCESS);
    assert_eq!(peer.read_back(2, 0, 4096), Ok(before));
}

#[test]
fn the_health_log_counts_the_namespaces_that_its_host_sees() {
    const OTHER: &str = "nqn.2014-08.org.nvmexpress:uuid:00000000-0a52-4d5f-9d0b-7d3a1f7d2c11";
    let rig = TcpTestTarget::with_transport(Default::default());
    malloc::create(&rig.registry, MallocConfig::new("Hidden", 16384, 512)).unwrap();
    let hidden = NamespaceConfig { no_auto_visible: true, ..NamespaceConfig::new("Hidden") };
    assert_eq!(rig.target.add_namespace(NQN, hidden).unwrap(), 2);
    rig.target.add_namespace_host(NQN, 2, OTHER).unwrap();
    let mut admin = RawTcpHost::admin(&rig);
    let mut peer = RawTcpHost::io(&rig, &admin, 1, 16, false);
    let counts = |admin: &mut RawTcpHost| {
        let log = GetLogPage { lid: LogId::Health.to_wire(), length_bytes: 512, ..Default::default() };
        let page = controller_data(admin, log.to_sqe(0), 512);
        let health = HealthLog::decode(page.as_slice().try_into().unwrap());
        (health.host_reads, health.host_writes, health.data_units_written)
    };
    assert_eq!(peer.write(1, 0, &pattern(512, 1)), Status::SUCCESS);
    assert_eq!(counts(&mut admin), (0, 1, 1));
    let uri: nvme::Uri = format!("nvme+tcp://127.0.0.1:{}/{NQN}?ns=2", rig.address.trsvcid).parse().unwrap();
    on_host(|core| async move {
        let options = nvme::Options { hostnqn: Some(OTHER.parse().unwrap()), ..nvme::Options::default() };
        let mut namespace = nvme::Namespace::open(&core, &uri, &options).await.unwrap();
        let write = |tag| Request::write(Tag(tag), 128 * tag, 128, core.pool().take(65536).unwrap());
        let (mut batch, mut done): (Vec<_>, Vec<_>) = ((0..64).map(write).collect(), Vec::new());
        while done.len() < 64 {
            namespace.submit(&mut batch);
            namespace.poll(&mut done);
            core.sleep_ns(100_000).await;
        }
        assert!(done.iter().all(|one| one.status().is_success()));
    });
    assert_eq!(counts(&mut admin), (0, 1, 1), "nothing of what another host did in its own namespace");
    rig.target.add_namespace_host(NQN, 2, HOST).unwrap();
    let (reads, writes, units) = counts(&mut admin);
    assert!((reads, writes) == (0, 65) && units > 8, "{units} units");
}
