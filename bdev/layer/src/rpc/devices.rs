//! RPC methods that create, change and delete bdevs of modules without a base.

use std::sync::atomic::{AtomicU64, Ordering};

use control::{ByName, Method, RpcError};
use uuid::Uuid;

use super::BdevModule;
use crate::uring::FileModule;
use crate::{BdevError, MetadataConfig, malloc, null, pmem, uring};

pub(super) const MISSING: (i64, &str) =
    (RpcError::ENODEV, "there is no such bdev, or it is of another module");
const TAKEN: (i64, &str) = (RpcError::EEXIST, "the name or UUID is in use");
const GEOMETRY: (i64, &str) = (RpcError::EINVAL, "the geometry is invalid");
const MEMORY: (i64, &str) =
    (RpcError::ENOMEM, "all bdevs in memory together would be larger than the memory of the machine");

const FILE: &[(i64, &str)] = &[
    TAKEN,
    (
        RpcError::EBUSY,
        "another bdev or process uses the file, or the block device is mounted or otherwise in use",
    ),
    (RpcError::ENOTSUP, "the reactors have no io_uring; the message says why"),
    (-2, "and any other errno of opening the file"),
];

const AIO_FILE: &[(i64, &str)] = &[
    TAKEN,
    (
        RpcError::EBUSY,
        "another bdev or process uses the file, or the block device is mounted or otherwise in use",
    ),
    (RpcError::ENOTSUP, "there is no AIO, or `nowait` is set for a file; the message says why"),
    (-2, "and any other errno of opening the file"),
];

const PMEM_FILE: &[(i64, &str)] = &[
    TAKEN,
    (RpcError::EBUSY, "another bdev or process uses the file"),
    (RpcError::EINVAL, "it is no file, or the block size is invalid"),
    (RpcError::ENOTSUP, "the file is not on persistent memory, or the processor cannot flush to it"),
    (-2, "and any other errno of opening the file"),
];

/// The method that deletes a bdev of the module with this product name.
pub(super) fn delete(method: &'static str, product: &'static str) -> Method<BdevModule> {
    super::delete_method(method, product, |bdevs| bdevs)
}

pub(super) fn methods() -> Vec<Method<BdevModule>> {
    let create = |method: Method<BdevModule>, text| method.text(text, "name of the bdev");
    vec![
        create(Method::update("bdev_malloc_create", malloc_create), "Creates a bdev in memory.")
            .assigns(&["name", "uuid", "physical_block_size"])
        .canonical(|_: &BdevModule, params: &mut MallocCreate| {
            params.set_data_bytes();
            Ok(())
        })
        .errors(&[TAKEN, GEOMETRY, MEMORY]),
        delete("bdev_malloc_delete", "Malloc disk"),
        create(
            Method::update("bdev_null_create", null_create),
            "Creates a bdev that discards writes and leaves buffers of reads unchanged.",
        )
        .assigns(&["uuid", "physical_block_size"])
        .canonical(|_: &BdevModule, params: &mut NullCreate| {
            params.block_size = data_bytes(params.block_size, params.md_size);
            Ok(())
        })
        .errors(&[TAKEN, GEOMETRY]),
        delete("bdev_null_delete", "Null disk"),
        Method::update("bdev_null_resize", null_resize)
            .text("Resizes a null bdev.", "true")
            .errors(&[MISSING]),
        create(
            Method::update("bdev_uring_create", uring_create),
            "Creates a bdev on a file or a block device, through io_uring.",
        )
        .assigns(&["uuid", "block_size"])
        .errors(FILE),
        delete("bdev_uring_delete", FileModule::Uring.product_name()),
        Method::update("bdev_uring_rescan", |bdevs, params: ByName| rescan(bdevs, &params, FileModule::Uring))
            .text("Applies the present size of the file.", "true")
            .errors(&[MISSING]),
        create(
            Method::update("bdev_aio_create", aio_create),
            "Creates a bdev on a file or a block device, through Linux AIO. Reactors need no io_uring for it.",
        )
        .assigns(&["uuid", "block_size"])
        .errors(AIO_FILE),
        delete("bdev_aio_delete", FileModule::Aio.product_name()),
        create(
            Method::update("bdev_pmem_create", pmem_create),
            "Creates a bdev on a file of a file system with DAX, on persistent memory. A completed write is durable, without a \
             system call. SPDK's method of this name, which newer versions lack, wanted a pool of libpmemblk.",
        )
        .assigns(&["uuid"])
        .errors(PMEM_FILE),
        delete("bdev_pmem_delete", pmem::PRODUCT_NAME),
        Method::update("bdev_aio_rescan", |bdevs, params: ByName| rescan(bdevs, &params, FileModule::Aio))
            .text("Applies the present size of the file.", "true")
            .errors(&[MISSING]),
    ]
}

control::parameters! {
    struct MallocCreate {
        /// Name; without, the next unused of Malloc0, Malloc1, …
        name: Option<String>,
        /// Number of blocks
        num_blocks: u64 ["blocks"],
        /// Size of a block's data; data and metadata together, as SPDK saves interleaved ones, if it is no
        /// multiple of 512
        block_size: u32 ["bytes"],
        /// Size of a physical block; 0 is `block_size`
        physical_block_size: u32 ["bytes"] = 0,
        /// UUID; without, a random one
        uuid: Option<Uuid>,
        /// I/O should not cross multiples of this; 0 is no boundary
        optimal_io_boundary: u32 ["blocks"] = 0,
        /// Metadata of a block: 0, 8, 16, 32, 64 or 128
        md_size: u32 ["bytes"] = 0,
        /// Metadata follows the data of each block, whose size then includes it
        md_interleave: bool = false,
        /// Type of protection information in the metadata, 1 to 3; 0 is none
        dif_type: u32 = 0,
        /// Protection information is in the first bytes of the metadata, instead of the last
        dif_is_head_of_md: bool = false,
        /// Guard of the protection information: 0 has 16 bits; 1 has 32 and 2 has 64 bits, and need 16 bytes
        /// of metadata
        dif_pi_format: u32 = 0,
    }
    only("memory is not placed by NUMA node") { numa_id: i32 = -1 }
}

impl MallocCreate {
    /// Makes `block_size` that of the data.
    fn set_data_bytes(&mut self) {
        let data_bytes = data_bytes(self.block_size, self.md_size);
        // Only a size with its metadata is no multiple of 512. SPDK saves `md_interleave` nowhere else.
        self.md_interleave |= data_bytes != self.block_size;
        self.block_size = data_bytes;
    }
}

fn malloc_create(bdevs: &BdevModule, mut params: MallocCreate) -> Result<String, RpcError> {
    let name = params.name.take().unwrap_or_else(|| next_malloc_name(bdevs));
    params.set_data_bytes();
    let mut config = malloc::MallocConfig::new(&name, params.num_blocks, params.block_size);
    config.uuid = params.uuid;
    config.physical_block_size = params.physical_block_size;
    config.optimal_io_boundary_blocks = params.optimal_io_boundary;
    config.metadata = MetadataConfig {
        md_size: params.md_size,
        md_interleave: params.md_interleave,
        dif_type: params.dif_type,
        dif_is_head_of_md: params.dif_is_head_of_md,
        dif_pi_format: params.dif_pi_format,
    };
    let device = malloc::create(&bdevs.registry, config)?;
    params.name = Some(name);
    params.physical_block_size = device.geometry().physical_block_size;
    params.uuid = Some(device.uuid());
    Ok(bdevs.record(&device, "bdev_malloc_create", &params))
}

/// The data of a block. SPDK's methods take this size; its `save_config` writes that with interleaved
/// metadata.
fn data_bytes(block_size: u32, md_size: u32) -> u32 {
    match block_size.checked_sub(md_size) {
        Some(data) if !block_size.is_multiple_of(512) && data.is_multiple_of(512) => data,
        _ => block_size,
    }
}

/// The next unused name of `Malloc0`, `Malloc1`, …, as in SPDK.
fn next_malloc_name(bdevs: &BdevModule) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    loop {
        let name = format!("Malloc{}", COUNT.fetch_add(1, Ordering::Relaxed));
        if bdevs.registry.find(&name).is_none() {
            return name;
        }
    }
}

control::parameters! {
    struct NullCreate {
        /// Name
        name: String,
        /// Number of blocks
        num_blocks: u64 ["blocks"],
        /// Size of a block's data; data and metadata together, as SPDK saves it, if it is no multiple of 512
        block_size: u32 ["bytes"],
        /// Size of a physical block; 0 is `block_size`
        physical_block_size: u32 ["bytes"] = 0,
        /// UUID; without, a random one
        uuid: Option<Uuid>,
        /// Metadata of a block, which follows its data: 0, 8, 16, 32, 64 or 128
        md_size: u32 ["bytes"] = 0,
        /// Type of protection information in the metadata, 1 to 3; 0 is none
        dif_type: u32 = 0,
        /// Protection information is in the first bytes of the metadata, instead of the last
        dif_is_head_of_md: bool = false,
        /// Guard of the protection information: 0 has 16 bits; 1 has 32 and 2 has 64 bits, and need 16 bytes
        /// of metadata
        dif_pi_format: u32 = 0,
    }
    only("bdevs have no such hints") {
        preferred_write_granularity: u32 = 0,
        preferred_write_alignment: u32 = 0,
        optimal_write_size: u32 = 0,
        preferred_unmap_granularity: u32 = 0,
        preferred_unmap_alignment: u32 = 0,
    }
}

fn null_create(bdevs: &BdevModule, mut params: NullCreate) -> Result<String, RpcError> {
    params.block_size = data_bytes(params.block_size, params.md_size);
    let mut config = null::NullConfig::new(&params.name, params.num_blocks, params.block_size);
    config.metadata = MetadataConfig {
        md_size: params.md_size,
        // As in SPDK, whose null device has no separate metadata.
        md_interleave: true,
        dif_type: params.dif_type,
        dif_is_head_of_md: params.dif_is_head_of_md,
        dif_pi_format: params.dif_pi_format,
    };
    config.uuid = params.uuid;
    config.physical_block_size = params.physical_block_size;
    let device = null::create(&bdevs.registry, config)?;
    params.physical_block_size = device.geometry().physical_block_size;
    params.uuid = Some(device.uuid());
    Ok(bdevs.record(&device, "bdev_null_create", &params))
}

control::parameters! {
    struct UringCreate {
        /// Name
        name: String,
        /// File, block device or NVMe generic device (`/dev/ngXnY`), to which NVMe commands are passed
        /// through
        filename: String,
        /// Size of a block; 0 is that of the file
        block_size: u32 ["bytes"] = 0,
        /// UUID; without, that of the file or disk, which is the same each time
        uuid: Option<Uuid>,
        /// Poll the device for completions, instead of interrupts; it needs polled queues
        iopoll: bool = false,
        /// Submit by a thread of the kernel, instead of system calls
        sqpoll: bool = false,
        /// Processor of that thread
        sqpoll_cpu: Option<u32>,
        /// Use a block device although it is mounted, used as swap, part of another device, or open
        /// exclusively; not in SPDK
        force: bool = false,
    }
}

fn uring_create(bdevs: &BdevModule, mut params: UringCreate) -> Result<String, RpcError> {
    let mut config = uring::UringConfig::new(&params.name, &params.filename);
    config.block_size = Some(params.block_size).filter(|bytes| *bytes != 0);
    config.uuid = params.uuid;
    config.polling = os::UringPolling {
        sqpoll: params.sqpoll,
        sqpoll_cpu: params.sqpoll_cpu,
        sqpoll_idle_ms: 0,
        iopoll: params.iopoll,
    };
    config.force = params.force;
    let device = uring::create(&bdevs.registry, config)?;
    params.block_size = device.geometry().block_size;
    params.uuid = Some(device.uuid());
    Ok(bdevs.record(&device, "bdev_uring_create", &params))
}

control::parameters! {
    struct NullResize {
        /// Name
        name: String,
        /// New size
        new_size: u64 ["MiB"],
    }
}

fn null_resize(bdevs: &BdevModule, params: NullResize) -> Result<bool, RpcError> {
    let device = bdevs.find(&params.name)?;
    let bytes = params.new_size.checked_mul(1 << 20).ok_or_else(|| {
        let reason = format!("{} MiB is not a valid capacity", params.new_size);
        BdevError::invalid("new_size", reason)
    })?;
    let num_blocks = bytes / u64::from(device.geometry().block_size);
    null::resize(&bdevs.registry, device.name(), num_blocks)?;
    bdevs.created.set_parameter(device.name(), "num_blocks", num_blocks);
    Ok(true)
}

control::parameters! {
    struct AioCreate {
        /// Name
        name: String,
        /// File or block device
        filename: String,
        /// Size of a block; 0 is that of the file
        block_size: u32 ["bytes"] = 0,
        /// Open the file read-only
        readonly: bool = false,
        /// Unmap deallocates and write zeroes uses `fallocate`, on a thread of the device; without, unmap is
        /// not supported and zeroes are written as data
        fallocate: bool = false,
        /// Reads and writes of a block device never wait within the system call (`RWF_NOWAIT`): they are
        /// retried when the device has resources for them
        nowait: bool = false,
        /// UUID; without, that of the file or disk, which is the same each time
        uuid: Option<Uuid>,
        /// Use a block device although it is mounted, used as swap, part of another device, or open
        /// exclusively; not in SPDK
        force: bool = false,
    }
}

fn aio_create(bdevs: &BdevModule, mut params: AioCreate) -> Result<String, RpcError> {
    let mut config = uring::UringConfig::new(&params.name, &params.filename);
    config.block_size = Some(params.block_size).filter(|bytes| *bytes != 0);
    config.readonly = params.readonly;
    config.uuid = params.uuid;
    config.aio = Some(uring::AioConfig { fallocate: params.fallocate, nowait: params.nowait });
    config.force = params.force;
    let device = uring::create(&bdevs.registry, config)?;
    params.block_size = device.geometry().block_size;
    params.uuid = Some(device.uuid());
    Ok(bdevs.record(&device, "bdev_aio_create", &params))
}

control::parameters! {
    struct PmemCreate {
        /// File, on ext4 or xfs that is mounted with `-o dax`
        pmem_file: String,
        /// Name
        name: String,
        /// Size of a block; not in SPDK, whose pools say it
        block_size: u32 ["bytes"] = 512,
        /// UUID; without, that of the file, which is the same each time; not in SPDK
        uuid: Option<Uuid>,
    }
}

fn pmem_create(bdevs: &BdevModule, mut params: PmemCreate) -> Result<String, RpcError> {
    let mut config = pmem::PmemConfig::new(&params.name, &params.pmem_file);
    config.block_size = params.block_size;
    config.uuid = params.uuid;
    let device = pmem::create(&bdevs.registry, config)?;
    params.uuid = Some(device.uuid());
    Ok(bdevs.record(&device, "bdev_pmem_create", &params))
}

fn rescan(bdevs: &BdevModule, params: &ByName, of: FileModule) -> Result<bool, RpcError> {
    uring::rescan(&bdevs.registry, &params.name, of)?;
    Ok(true)
}
