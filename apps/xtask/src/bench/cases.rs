//! The list of benchmarks.

use anyhow::bail;

use super::examples::Example;
use super::fio::FioTarget;
use super::instructions::CountedExample;
use super::load::{self, BenchDevice, IoPattern, RemoteLoad, TlsComparison};
use super::server::TargetTransport;
use super::stacked::StackedLayer;
use super::store::{LoopCache, StoreFault};
use super::{
    RunContext, RunOutcome, attack, bare, fio, idle, instructions, iscsi, lvol, nbd, page, scale, scaling,
    stacked, store, ublk, vhost,
};

/// A benchmark: its name, a description for `--list`, and what it runs.
pub(super) struct Benchmark {
    pub(super) name: &'static str,
    pub(super) description: &'static str,
    kind: BenchmarkKind,
}

enum BenchmarkKind {
    /// The load generator alone, on one core.
    Local(BenchDevice, IoPattern),
    /// A layer beside what is below it, on one core.
    Stacked(StackedLayer, IoPattern),
    /// The target on one core with an idle policy, the load generator on another.
    Remote(TargetTransport, BenchDevice, IoPattern, &'static str),
    /// The same over TCP with a null device, compared with an echo over bare sockets; with data digests if
    /// true.
    Bare(IoPattern, bool),
    /// Target and load generator over TCP with TLS, and without.
    Tls(IoPattern, TlsComparison),
    /// Target and load generator on the same two cores, with 16 connections.
    Shared(load::TargetScheduler),
    /// An I/O queue that moves between two reactors: its reads in flight.
    MoveStall(u32),
    /// 16 I/O queues that all begin on one of two reactors.
    MoveSpread,
    /// A session of iscsi-perf, with so many commands in flight.
    Iscsi(BenchDevice, u32),
    IscsiTwoSessions,
    IscsiIdle,
    /// libblkio with so many reads in flight; of the null device, with qemu-storage-daemon too.
    Vhost(BenchDevice, u32),
    VhostIdle,
    /// Reads by `qemu-img bench` at a queue depth, beside qemu-nbd.
    NbdQemuImg(u32),
    /// Reads by fio's nbd engine at a queue depth, beside qemu-nbd.
    Nbd(u32),
    NbdIdle,
    /// Reads of a ublk disk by fio at a queue depth.
    Ublk(u32),
    UblkIdle,
    /// An honest host beside hosts that keep the target's memory.
    Attack(attack::StalledHosts),
    Idle,
    Startup,
    /// Start-up, memory and removal of a large configuration.
    Scale,
    /// Instructions of the load generator on the null device, at a queue depth and with further options.
    Instructions(u32, &'static [&'static str]),
    /// Instructions at QD 128 on this device, after a method was called with these parameters.
    InstructionsConfigured(&'static str, &'static str, &'static str),
    InstructionsTarget,
    InstructionsOf(CountedExample),
    /// The driver alone, with N queue pairs on N cores.
    Scaling(usize),
    /// The load generator compared with fio.
    Fio(fio::FioJob),
    /// Start-up of many load generator processes.
    Processes,
    /// The replicated store with this number of logical groups, or the usual one, compared with a volume that
    /// is not replicated.
    Store(IoPattern, LoopCache, Option<u32>),
    /// The replicated store with logs on devices of their own.
    StoreLogs(IoPattern),
    /// The replicated store, compared with Ceph.
    StoreCeph(IoPattern),
    /// The replicated store while something happens to a node.
    StoreFault(StoreFault),
    /// The replicated store under a long load.
    StoreChurn,
    /// A node of the store with a large image.
    StoreLarge,
    /// Generation and loading of a lab report.
    Page,
    /// Reads or writes of a logical volume at a queue depth, beside its device.
    Lvol(&'static str, &'static str, u32),
    LvolFirstWrite(&'static str),
    LvolLoad(lvol::StoreState),
}

const fn case(name: &'static str, about: &'static str, kind: BenchmarkKind) -> Benchmark {
    Benchmark { name, description: about, kind }
}

const fn pattern_4k(rw: &'static str, depth: u32) -> IoPattern {
    IoPattern { rw, block: "4k", depth }
}

const LARGE: IoPattern = IoPattern { rw: "randread", block: "128k", depth: 16 };

use BenchDevice::{Malloc, Null};
use BenchmarkKind::{Bare, Instructions, InstructionsOf, InstructionsTarget, Local, Stacked};

const fn tcp(device: BenchDevice, pattern: IoPattern, idle: &'static str) -> BenchmarkKind {
    BenchmarkKind::Remote(TargetTransport::Tcp, device, pattern, idle)
}

const fn vfio_user(device: BenchDevice, pattern: IoPattern) -> BenchmarkKind {
    BenchmarkKind::Remote(TargetTransport::VfioUser, device, pattern, "spin")
}

const fn compare_fio(engine: &'static str, depth: u32, reads: FioTarget) -> BenchmarkKind {
    BenchmarkKind::Fio(fio::FioJob { engine, depth, reads })
}

const fn on_ram(engine: &'static str, depth: u32) -> BenchmarkKind {
    compare_fio(engine, depth, FioTarget::MemoryDevice)
}

const fn on_zram(engine: &'static str, depth: u32) -> BenchmarkKind {
    compare_fio(engine, depth, FioTarget::Zram)
}

const fn store_4k(rw: &'static str, depth: u32) -> BenchmarkKind {
    BenchmarkKind::Store(pattern_4k(rw, depth), LoopCache::None, None)
}

const fn store_flush_4k(depth: u32) -> BenchmarkKind {
    BenchmarkKind::Store(pattern_4k("randwrite", depth), LoopCache::Volatile, None)
}

const fn store_one_group_4k(depth: u32) -> BenchmarkKind {
    BenchmarkKind::Store(pattern_4k("randwrite", depth), LoopCache::None, Some(1))
}

pub(super) const ALL: &[Benchmark] = &[
    case(
        "null-qd1",
        "4 KiB reads of the null device, one core, QD 1",
        Local(Null, pattern_4k("randread", 1)),
    ),
    case("null-qd128", "the same at QD 128", Local(Null, pattern_4k("randread", 128))),
    case(
        "malloc-read",
        "4 KiB reads of a memory device, one core, QD 128",
        Local(Malloc, pattern_4k("randread", 128)),
    ),
    case("malloc-write", "4 KiB writes to the same device", Local(Malloc, pattern_4k("randwrite", 128))),
    case(
        "accel-copy",
        "copies of 4 KiB by the acceleration framework, beside copies without it, one core",
        Stacked(StackedLayer::AccelCopy, pattern_4k("read", 32)),
    ),
    case(
        "stacked-crypto-read",
        "4 KiB reads of a crypto bdev on a null device, QD 32, beside AES-256-XTS alone",
        Stacked(StackedLayer::Crypto, pattern_4k("randread", 32)),
    ),
    case(
        "stacked-crypto-write",
        "the same with writes, which encrypt a copy",
        Stacked(StackedLayer::Crypto, pattern_4k("randwrite", 32)),
    ),
    case(
        "stacked-raid0",
        "4 KiB reads of a raid0 of two devices limited to 200 k IOPS, QD 128, beside both alone",
        Stacked(StackedLayer::Raid0, pattern_4k("randread", 128)),
    ),
    case(
        "stacked-concat",
        "the same of a concat",
        Stacked(StackedLayer::Concat, pattern_4k("randread", 128)),
    ),
    case(
        "stacked-raid1-read",
        "the same of a raid1, which reads from both",
        Stacked(StackedLayer::Raid1, pattern_4k("randread", 128)),
    ),
    case(
        "stacked-split",
        "4 KiB reads of a part of a memory device, QD 32, beside the device",
        Stacked(StackedLayer::Split, pattern_4k("randread", 32)),
    ),
    case(
        "stacked-gpt",
        "4 KiB reads of a partition of a file in memory, QD 32, beside the file",
        Stacked(StackedLayer::Gpt, pattern_4k("randread", 32)),
    ),
    case(
        "tcp-null-read-qd1",
        "4 KiB reads over TCP, null device, QD 1",
        tcp(Null, pattern_4k("randread", 1), "spin"),
    ),
    case(
        "tcp-null-read-qd1-adaptive",
        "the same with --idle adaptive in the target",
        tcp(Null, pattern_4k("randread", 1), "adaptive"),
    ),
    case(
        "tcp-null-read-qd32",
        "the same with --idle spin at QD 32",
        tcp(Null, pattern_4k("randread", 32), "spin"),
    ),
    case("tcp-null-read-qd128", "the same at QD 128", tcp(Null, pattern_4k("randread", 128), "spin")),
    case(
        "tcp-null-write-qd1",
        "4 KiB writes over TCP, null device, QD 1",
        tcp(Null, pattern_4k("randwrite", 1), "spin"),
    ),
    case("tcp-null-write-qd32", "the same at QD 32", tcp(Null, pattern_4k("randwrite", 32), "spin")),
    case("tcp-null-write-qd128", "the same at QD 128", tcp(Null, pattern_4k("randwrite", 128), "spin")),
    case(
        "bare-read-qd1",
        "4 KiB reads over TCP, null device, QD 1, and an echo of the same bytes over bare sockets",
        Bare(pattern_4k("randread", 1), false),
    ),
    case(
        "bare-read-qd32",
        "4 KiB reads over TCP, null device, QD 32, and an echo of the same bytes over bare sockets",
        Bare(pattern_4k("randread", 32), false),
    ),
    case(
        "bare-read-qd128",
        "4 KiB reads over TCP, null device, QD 128, and an echo of the same bytes over bare sockets",
        Bare(pattern_4k("randread", 128), false),
    ),
    case(
        "bare-read-digest-qd32",
        "the same at QD 32 with data digests, which the echo computes and checks too",
        Bare(pattern_4k("randread", 32), true),
    ),
    case(
        "bare-write-qd1",
        "4 KiB writes over TCP, null device, QD 1, and an echo of the same bytes over bare sockets",
        Bare(pattern_4k("randwrite", 1), false),
    ),
    case(
        "bare-write-qd32",
        "4 KiB writes over TCP, null device, QD 32, and an echo of the same bytes over bare sockets",
        Bare(pattern_4k("randwrite", 32), false),
    ),
    case(
        "bare-write-qd128",
        "4 KiB writes over TCP, null device, QD 128, and an echo of the same bytes over bare sockets",
        Bare(pattern_4k("randwrite", 128), false),
    ),
    case(
        "bare-write-digest-qd32",
        "the same at QD 32 with data digests, which the echo computes and checks too",
        Bare(pattern_4k("randwrite", 32), true),
    ),
    case(
        "tcp-malloc-read",
        "4 KiB reads over TCP, memory device, QD 128",
        tcp(Malloc, pattern_4k("randread", 128), "spin"),
    ),
    case(
        "tcp-malloc-write",
        "4 KiB writes to the same device",
        tcp(Malloc, pattern_4k("randwrite", 128), "spin"),
    ),
    case("tcp-null-128k", "128 KiB reads over TCP, null device, QD 16", tcp(Null, LARGE, "spin")),
    case("tcp-malloc-128k", "the same from a memory device", tcp(Malloc, LARGE, "spin")),
    case(
        "tls-read-128k",
        "128 KiB reads of a memory device with TLS, QD 16, beside the same without and the cipher",
        BenchmarkKind::Tls(LARGE, TlsComparison::Cpu),
    ),
    case(
        "tls-read-qd1",
        "4 KiB reads of a memory device with TLS, QD 1, beside the same without",
        BenchmarkKind::Tls(pattern_4k("randread", 1), TlsComparison::Latency),
    ),
    case(
        "tcp-2x16",
        "4 KiB reads, 16 connections of QD 8, target and generator on the same two cores",
        BenchmarkKind::Shared(load::TargetScheduler::Static),
    ),
    case(
        "tcp-2x16-moved",
        "the same with the dynamic scheduler, which moves I/O queues from one reactor to the other",
        BenchmarkKind::Shared(load::TargetScheduler::Dynamic),
    ),
    case(
        "balance-stall-qd1",
        "the longest pause between two answers of an I/O queue that moves to another reactor, QD 1",
        BenchmarkKind::MoveStall(1),
    ),
    case("balance-stall-qd32", "the same at QD 32", BenchmarkKind::MoveStall(32)),
    case(
        "balance-2x16",
        "16 I/O queues that all begin on one of two reactors, after a second, beside an even start",
        BenchmarkKind::MoveSpread,
    ),
    case(
        "attack-66",
        "4 KiB reads and writes, QD 32, beside 66 I/O queues that never send their data, one reactor",
        BenchmarkKind::Attack(attack::StalledHosts { queues: 66, command: "write", reactors: 1 }),
    ),
    case(
        "attack-300",
        "the same beside 300 queues",
        BenchmarkKind::Attack(attack::StalledHosts { queues: 300, command: "write", reactors: 1 }),
    ),
    case(
        "attack-300-reads",
        "the same beside 300 queues that never receive their answers",
        BenchmarkKind::Attack(attack::StalledHosts { queues: 300, command: "read", reactors: 1 }),
    ),
    case(
        "attack-1000",
        "the same as attack-66 beside 1,000 queues",
        BenchmarkKind::Attack(attack::StalledHosts { queues: 1000, command: "write", reactors: 1 }),
    ),
    case(
        "attack-1000-two",
        "the same with two reactors",
        BenchmarkKind::Attack(attack::StalledHosts { queues: 1000, command: "write", reactors: 2 }),
    ),
    case(
        "idle",
        "CPU time and memory of a target with ten namespaces and one idle host",
        BenchmarkKind::Idle,
    ),
    case("startup", "from exec of the target to the first accepted connection", BenchmarkKind::Startup),
    case(
        "scale",
        "10,000 block devices and namespaces in 1,000 subsystems: start, memory, removal",
        BenchmarkKind::Scale,
    ),
    case(
        "vfio-user-null-read-qd1",
        "4 KiB reads over vfio-user, our driver, null device, QD 1",
        vfio_user(Null, pattern_4k("randread", 1)),
    ),
    case("vfio-user-null-read-qd32", "the same at QD 32", vfio_user(Null, pattern_4k("randread", 32))),
    case("vfio-user-null-read-qd128", "the same at QD 128", vfio_user(Null, pattern_4k("randread", 128))),
    case(
        "vfio-user-malloc-read-qd32",
        "the same from a memory device at QD 32",
        vfio_user(Malloc, pattern_4k("randread", 32)),
    ),
    case(
        "iscsi-null-read-qd1",
        "4 KiB reads over iSCSI by iscsi-perf, null device, QD 1",
        BenchmarkKind::Iscsi(Null, 1),
    ),
    case("iscsi-null-read-qd32", "the same at QD 32", BenchmarkKind::Iscsi(Null, 32)),
    case("iscsi-malloc-read-qd32", "the same from a memory device", BenchmarkKind::Iscsi(Malloc, 32)),
    case(
        "iscsi-null-two-sessions",
        "two sessions of QD 32 on two reactors and one unit, compared with one",
        BenchmarkKind::IscsiTwoSessions,
    ),
    case("iscsi-idle", "CPU time of a target with an idle session", BenchmarkKind::IscsiIdle),
    case(
        "nbd-null-read-qd1",
        "4 KiB reads over NBD by fio, null device, QD 1, compared with qemu-nbd's null-co",
        BenchmarkKind::Nbd(1),
    ),
    case("nbd-null-read-qd32", "the same at QD 32", BenchmarkKind::Nbd(32)),
    case(
        "nbd-null-read-qd32-qemu-img",
        "4 KiB sequential reads by qemu-img bench at QD 32, which costs less than fio",
        BenchmarkKind::NbdQemuImg(32),
    ),
    case("nbd-idle", "CPU time of a target with an idle client", BenchmarkKind::NbdIdle),
    case(
        "ublk-null-read-qd1",
        "4 KiB reads of a ublk disk by fio, null device, QD 1",
        BenchmarkKind::Ublk(1),
    ),
    case("ublk-null-read-qd32", "the same at QD 32", BenchmarkKind::Ublk(32)),
    case("ublk-idle", "CPU time of a target with an idle ublk disk", BenchmarkKind::UblkIdle),
    case(
        "vhost-user-null-read-qd1",
        "4 KiB reads over vhost-user by libblkio, null device, QD 1; those of qemu-storage-daemon and a bare device",
        BenchmarkKind::Vhost(Null, 1),
    ),
    case("vhost-user-null-read-qd32", "the same at QD 32", BenchmarkKind::Vhost(Null, 32)),
    case("vhost-user-null-read-qd128", "the same at QD 128", BenchmarkKind::Vhost(Null, 128)),
    case(
        "vhost-user-malloc-read-qd1",
        "4 KiB reads over vhost-user by libblkio, memory device, QD 1",
        BenchmarkKind::Vhost(Malloc, 1),
    ),
    case("vhost-user-malloc-read-qd32", "the same at QD 32", BenchmarkKind::Vhost(Malloc, 32)),
    case("vhost-user-malloc-read-qd128", "the same at QD 128", BenchmarkKind::Vhost(Malloc, 128)),
    case(
        "vhost-user-idle",
        "CPU time of a target with an attached device that is not used",
        BenchmarkKind::VhostIdle,
    ),
    case(
        "driver-qpairs-1",
        "the driver alone at QD 128, one queue pair on one core",
        BenchmarkKind::Scaling(1),
    ),
    case("driver-qpairs-2", "the same with two queue pairs, a core each", BenchmarkKind::Scaling(2)),
    case("driver-qpairs-4", "the same with four", BenchmarkKind::Scaling(4)),
    case("driver-qpairs-8", "the same with eight", BenchmarkKind::Scaling(8)),
    case(
        "fio-null",
        "the null engine, compared with fio's, QD 128",
        compare_fio("null", 128, FioTarget::Nothing),
    ),
    case(
        "fio-psync",
        "reads of a file in /dev/shm with psync, compared with fio",
        compare_fio("psync", 1, FioTarget::MemoryFile),
    ),
    case("fio-libaio", "the same with libaio, QD 32", compare_fio("libaio", 32, FioTarget::MemoryFile)),
    case("fio-io_uring", "the same with io_uring, QD 32", compare_fio("io_uring", 32, FioTarget::MemoryFile)),
    case(
        "fio-ram-psync",
        "direct reads of a loop device over memory with psync, compared with fio",
        on_ram("psync", 1),
    ),
    case("fio-ram-libaio-qd1", "the same with libaio, QD 1", on_ram("libaio", 1)),
    case("fio-ram-libaio-qd32", "the same at QD 32", on_ram("libaio", 32)),
    case("fio-ram-libaio-qd128", "the same at QD 128", on_ram("libaio", 128)),
    case("fio-ram-io_uring-qd1", "the same with io_uring, QD 1", on_ram("io_uring", 1)),
    case("fio-ram-io_uring-qd32", "the same at QD 32", on_ram("io_uring", 32)),
    case("fio-ram-io_uring-qd128", "the same at QD 128", on_ram("io_uring", 128)),
    case(
        "fio-zram-psync",
        "direct reads of a zram device with psync, compared with fio",
        on_zram("psync", 1),
    ),
    case("fio-zram-libaio-qd1", "the same with libaio, QD 1", on_zram("libaio", 1)),
    case("fio-zram-libaio-qd32", "the same at QD 32", on_zram("libaio", 32)),
    case("fio-zram-libaio-qd128", "the same at QD 128", on_zram("libaio", 128)),
    case("fio-zram-io_uring-qd1", "the same with io_uring, QD 1", on_zram("io_uring", 1)),
    case("fio-zram-io_uring-qd32", "the same at QD 32", on_zram("io_uring", 32)),
    case("fio-zram-io_uring-qd128", "the same at QD 128", on_zram("io_uring", 128)),
    case(
        "processes-256",
        "256 processes of one I/O each, from exec to the last exit",
        BenchmarkKind::Processes,
    ),
    case(
        "store-write-qd1",
        "4 KiB random writes to an image with two replicas, compared with a volume without, QD 1",
        store_4k("randwrite", 1),
    ),
    case("store-write-qd16", "the same at QD 16", store_4k("randwrite", 16)),
    case("store-write-qd64", "the same at QD 64", store_4k("randwrite", 64)),
    case("store-write-qd128", "the same at QD 128", store_4k("randwrite", 128)),
    case("store-write-qd256", "the same at QD 256", store_4k("randwrite", 256)),
    case(
        "store-write-one-group-qd16",
        "writes at QD 16 to an image of one logical group, so with one log and one primary",
        store_one_group_4k(16),
    ),
    case("store-write-one-group-qd128", "the same at QD 128", store_one_group_4k(128)),
    case(
        "store-write-logs-qd16",
        "writes at QD 16 with logs on devices of their own",
        BenchmarkKind::StoreLogs(pattern_4k("randwrite", 16)),
    ),
    case(
        "store-ceph-write-qd1",
        "4 KiB random writes to an image with two replicas, in turn with Ceph where that is installed, QD 1",
        BenchmarkKind::StoreCeph(pattern_4k("randwrite", 1)),
    ),
    case("store-ceph-write-qd16", "the same at QD 16", BenchmarkKind::StoreCeph(pattern_4k("randwrite", 16))),
    case(
        "store-ceph-write-qd128",
        "the same at QD 128",
        BenchmarkKind::StoreCeph(pattern_4k("randwrite", 128)),
    ),
    case(
        "store-kill",
        "writes at QD 16 while one of three nodes is killed and starts again",
        BenchmarkKind::StoreFault(StoreFault::Kill),
    ),
    case(
        "store-stop",
        "the same while one is stopped for two seconds",
        BenchmarkKind::StoreFault(StoreFault::Stop),
    ),
    case(
        "store-maintenance",
        "the same while `store stop-node` stops one for two seconds",
        BenchmarkKind::StoreFault(StoreFault::Maintenance),
    ),
    case(
        "store-out",
        "the same while the replicas of one are copied to the others",
        BenchmarkKind::StoreFault(StoreFault::Out),
    ),
    case(
        "store-churn",
        "writes at QD 64 for three minutes (--churn-seconds): the last tenth against the first, memory of a node",
        BenchmarkKind::StoreChurn,
    ),
    case(
        "store-large",
        "writes at QD 128 over 240 GiB of one node: its memory, and its start after SIGKILL",
        BenchmarkKind::StoreLarge,
    ),
    case(
        "store-write-flush-qd1",
        "writes on devices with a volatile cache, which the store flushes, QD 1",
        store_flush_4k(1),
    ),
    case("store-write-flush-qd16", "the same at QD 16", store_flush_4k(16)),
    case("store-read-qd1", "4 KiB random reads of the same, QD 1", store_4k("randread", 1)),
    case("store-read-qd16", "the same at QD 16", store_4k("randread", 16)),
    case("store-read-qd64", "the same at QD 64", store_4k("randread", 64)),
    case(
        "report-10k",
        "an HTML report of 10,000 cells: time to generate, and to load in a browser",
        BenchmarkKind::Page,
    ),
    case(
        "lvol-thick-read-qd1",
        "4 KiB random reads of a thick logical volume in memory, in turn with its device, QD 1",
        BenchmarkKind::Lvol("thick", "Read", 1),
    ),
    case("lvol-thick-read-qd32", "the same at QD 32", BenchmarkKind::Lvol("thick", "Read", 32)),
    case("lvol-thick-read-qd128", "the same at QD 128", BenchmarkKind::Lvol("thick", "Read", 128)),
    case("lvol-thick-write-qd32", "writes at QD 32", BenchmarkKind::Lvol("thick", "Write", 32)),
    case(
        "lvol-thin-read-qd32",
        "reads of a thin volume that has all clusters, QD 32",
        BenchmarkKind::Lvol("thin", "Read", 32),
    ),
    case(
        "lvol-chain-read-qd32",
        "reads through ten snapshots, of which each has a tenth of the clusters, QD 32",
        BenchmarkKind::Lvol("chain", "Read", 32),
    ),
    case(
        "lvol-first-write-cluster",
        "first writes of whole clusters of 64 KiB on a device of 100 µs, beside later ones",
        BenchmarkKind::LvolFirstWrite("a whole cluster"),
    ),
    case(
        "lvol-first-write-4k",
        "the same of 4 KiB in new clusters",
        BenchmarkKind::LvolFirstWrite("4 KiB in a new cluster"),
    ),
    case(
        "lvol-first-write-snapshot-4k",
        "the same of 4 KiB in clusters of a snapshot, which are copied",
        BenchmarkKind::LvolFirstWrite("4 KiB in a snapshot's cluster"),
    ),
    case(
        "lvol-load",
        "the load of an unloaded store of 16 TiB with 1,000 volumes, in a sparse file in memory",
        BenchmarkKind::LvolLoad(lvol::StoreState::Clean),
    ),
    case(
        "lvol-load-killed",
        "the same of one whose program has ended without unloading it",
        BenchmarkKind::LvolLoad(lvol::StoreState::Killed),
    ),
    case(
        "lvol-load-foreign",
        "the same of one that another program wrote, beside the time to read its metadata in order",
        BenchmarkKind::LvolLoad(lvol::StoreState::Foreign),
    ),
    case("instructions-null-qd1", "instructions per I/O of null-qd1", Instructions(1, &[])),
    case("instructions-null-qd128", "instructions per I/O of null-qd128", Instructions(128, &[])),
    case(
        "instructions-null-qos",
        "the same at QD 128 with a rate limit that is not reached",
        BenchmarkKind::InstructionsConfigured(
            "Null0",
            "bdev_set_qos_limit",
            r#"{ "name": "Null0", "rw_ios_per_sec": 1000000000 }"#,
        ),
    ),
    case(
        "instructions-null-trace",
        "the same with the trace of the bdev layer enabled, two events an I/O",
        BenchmarkKind::InstructionsConfigured("Null0", "trace_enable_tpoint_group", r#"{ "name": "bdev" }"#),
    ),
    case(
        "instructions-null-split",
        "the same on a split bdev of a null device",
        BenchmarkKind::InstructionsConfigured(
            "Null0p0",
            "bdev_split_create",
            r#"{ "base_bdev": "Null0", "split_count": 1 }"#,
        ),
    ),
    case(
        "instructions-null-raid0",
        "the same on a raid0 of two null devices",
        BenchmarkKind::InstructionsConfigured(
            "R0",
            "bdev_raid_create",
            r#"{ "name": "R0", "raid_level": "raid0", "strip_size_kb": 64, "base_bdevs": ["Null0", "Null1"] }"#,
        ),
    ),
    case(
        "instructions-null-rate",
        "the same in an open loop whose rate is never reached",
        Instructions(128, &["--rate_iops=1000000000"]),
    ),
    case(
        "instructions-null-poisson",
        "the same with Poisson arrivals",
        Instructions(128, &["--rate_iops=1000000000", "--rate_process=poisson"]),
    ),
    case(
        "instructions-driver",
        "instructions of the driver per 4 KiB read, submission and completion, QD 128",
        InstructionsOf(instructions::DRIVER),
    ),
    case(
        "instructions-vfio-user",
        "instructions of a vfio-user target per 4 KiB read of a null device, QD 128",
        InstructionsOf(instructions::VFIO_USER),
    ),
    case(
        "instructions-vhost",
        "instructions of a vhost-user target per 4 KiB read of a null device, QD 128",
        InstructionsOf(instructions::VHOST),
    ),
    case(
        "instructions-lvol-thick-read",
        "instructions of a 4 KiB read of a thick logical volume in memory, its device and the copy included, QD 128",
        InstructionsOf(instructions::LVOL_THICK),
    ),
    case(
        "instructions-lvol-chain-read",
        "the same through ten snapshots",
        InstructionsOf(instructions::LVOL_CHAIN),
    ),
    case(
        "instructions-target",
        "instructions of a TCP target per 4 KiB read of a memory device",
        InstructionsTarget,
    ),
];

/// Minimum number of runs of the start-up benchmark.
const STARTS_MIN: u32 = 10;

impl Benchmark {
    pub(super) fn run(&self, context: &RunContext<'_>) -> anyhow::Result<RunOutcome> {
        match &self.kind {
            Local(device, pattern) => load::local(context, *device, pattern),
            Stacked(layer, pattern) => stacked::compare(context, *layer, pattern),
            BenchmarkKind::Remote(transport, device, pattern, idle) => {
                let (transport, device) = (*transport, *device);
                load::remote(context, &RemoteLoad { transport, device, pattern, idle, query: "" })
            }
            Bare(pattern, data_digest) => bare::compare(context, pattern, *data_digest),
            BenchmarkKind::Tls(pattern, comparison) => load::compare_tls(context, pattern, *comparison),
            BenchmarkKind::Shared(scheduler) => load::shared(context, *scheduler),
            BenchmarkKind::MoveStall(depth) => scaling::stall(context, *depth),
            BenchmarkKind::MoveSpread => scaling::spread(context),
            BenchmarkKind::Iscsi(device, depth) => iscsi::reads(context, *device, *depth),
            BenchmarkKind::IscsiTwoSessions => iscsi::two_sessions(context),
            BenchmarkKind::IscsiIdle => iscsi::idle(context),
            BenchmarkKind::Vhost(device, depth) => vhost::reads(context, *device, *depth),
            BenchmarkKind::VhostIdle => vhost::idle(context),
            BenchmarkKind::Nbd(depth) => nbd::reads(context, *depth, nbd::NbdClient::Fio),
            BenchmarkKind::NbdQemuImg(depth) => nbd::reads(context, *depth, nbd::NbdClient::QemuImg),
            BenchmarkKind::NbdIdle => nbd::idle(context),
            BenchmarkKind::Ublk(depth) => ublk::reads(context, *depth),
            BenchmarkKind::UblkIdle => ublk::idle(context),
            BenchmarkKind::Attack(hosts) => attack::measure(context, hosts),
            BenchmarkKind::Idle => idle::idle(context),
            BenchmarkKind::Startup => idle::startup(context),
            BenchmarkKind::Scale => scale::scale(context),
            Instructions(depth, options) => instructions::null(context, *depth, options),
            BenchmarkKind::InstructionsConfigured(device, method, params) => {
                instructions::configured(context, device, method, params)
            }
            InstructionsTarget => instructions::target(context),
            InstructionsOf(counted) => instructions::example(context, counted),
            BenchmarkKind::Scaling(pairs) => scaling::driver(context, *pairs),
            BenchmarkKind::Lvol(volume, op, depth) => lvol::volume(context, volume, op, *depth),
            BenchmarkKind::LvolFirstWrite(kind) => lvol::first_write(context, kind),
            BenchmarkKind::LvolLoad(state) => lvol::load(context, *state),
            BenchmarkKind::Fio(job) => fio::compare(context, job),
            BenchmarkKind::Processes => fio::processes(context),
            BenchmarkKind::Store(pattern, cache, groups) => store::compare(context, pattern, *cache, *groups),
            BenchmarkKind::StoreLogs(pattern) => store::measure_separate_logs(context, pattern),
            BenchmarkKind::StoreCeph(pattern) => store::compare_ceph(context, pattern),
            BenchmarkKind::StoreFault(fault) => store::measure_fault(context, *fault),
            BenchmarkKind::StoreChurn => store::measure_churn(context),
            BenchmarkKind::StoreLarge => store::measure_large(context),
            BenchmarkKind::Page => page::page(context),
        }
    }

    /// The Cargo examples that it runs.
    pub(super) fn examples(&self) -> &[Example] {
        match &self.kind {
            InstructionsOf(counted) => std::slice::from_ref(&counted.example),
            BenchmarkKind::Scaling(_) => &[scaling::DRIVER],
            BenchmarkKind::MoveStall(_) => &[scaling::STALL],
            BenchmarkKind::MoveSpread => &[scaling::SPREAD],
            BenchmarkKind::Lvol(..) => &[lvol::COST],
            BenchmarkKind::LvolFirstWrite(_) => &[lvol::FIRST_WRITE],
            BenchmarkKind::LvolLoad(_) => &[lvol::STORE],
            BenchmarkKind::Page => &[page::SYNTHETIC],
            Bare(..) => &[bare::ECHO],
            BenchmarkKind::Attack(_) => &[attack::STALLED],
            BenchmarkKind::Vhost(..) | BenchmarkKind::VhostIdle => &[vhost::CLIENT, vhost::BARE],
            _ => &[],
        }
    }

    /// Whether it exchanges data between the first two cores, so that their placement matters.
    pub(super) fn uses_two_cores(&self) -> bool {
        matches!(
            self.kind,
            BenchmarkKind::Remote(..)
                | Bare(..)
                | BenchmarkKind::Tls(..)
                | BenchmarkKind::Shared(_)
                | BenchmarkKind::Vhost(..)
                | BenchmarkKind::Attack(_)
                | BenchmarkKind::Store(..)
        )
    }

    /// Whether it measures the program `ringbolt`, rather than an example of this checkout.
    pub(super) fn measures_ringbolt(&self) -> bool {
        !matches!(
            self.kind,
            InstructionsOf(_)
                | BenchmarkKind::MoveStall(_)
                | BenchmarkKind::MoveSpread
                | BenchmarkKind::Scaling(_)
                | BenchmarkKind::Lvol(..)
                | BenchmarkKind::LvolFirstWrite(_)
                | BenchmarkKind::LvolLoad(_)
        )
    }

    /// Number of runs when `runs` are requested.
    pub(super) fn run_count(&self, runs: u32) -> u32 {
        match self.kind {
            BenchmarkKind::Startup => runs.max(STARTS_MIN),
            // Instruction counts are reproducible, and one long load has many samples.
            Instructions(..)
            | BenchmarkKind::StoreChurn
            | BenchmarkKind::InstructionsConfigured(..)
            | InstructionsTarget
            | InstructionsOf(_) => 1,
            _ => runs,
        }
    }
}

/// The benchmarks whose names, or the first words of whose names, are in `names`; all if that is empty.
pub(super) fn select(names: &[String]) -> anyhow::Result<Vec<&'static Benchmark>> {
    let matches = |case: &Benchmark, name: &str| {
        let stem = name.trim_end_matches(['*', '-']);
        case.name == stem || case.name.strip_prefix(stem).is_some_and(|rest| rest.starts_with('-'))
    };
    if let Some(name) = names.iter().find(|name| !ALL.iter().any(|case| matches(case, name))) {
        bail!("no benchmark {name}; --list names them");
    }
    Ok(ALL.iter().filter(|case| names.is_empty() || names.iter().any(|name| matches(case, name))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benchmarks_are_selected_by_name_or_its_first_words() {
        let selected = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            select(&names).map(|cases| cases.iter().map(|case| case.name).collect::<Vec<_>>()).ok()
        };
        assert_eq!(selected(&["null", "idle"]), Some(vec!["null-qd1", "null-qd128", "idle"]));
        assert_eq!(selected(&["tcp-malloc-*"]).map(|names| names.len()), Some(3));
        assert_eq!(selected(&["tcp-n"]), None);
        assert_eq!(selected(&[]).map(|names| names.len()), Some(ALL.len()));
    }
}
