//! A device whose I/O is an operation of the acceleration framework: `accel:OPERATION`.
//!
//! Each read or write of one block executes the operation once, on memory of its channel that fits the caches
//! where `size` does. The request's own data is not touched. A copy or fill that is assigned to a device
//! completes when that has executed it. `accel:memcpy` copies without the framework: what `accel:copy` is to
//! be compared with.

use std::rc::Rc;
use std::sync::Arc;

use accel::{
    Accel, AccelChannel, AccelFailure, AccelOp, AccelQueue, Cipher, CryptoKey, DeviceFailure, DeviceOutcome,
    IoatOp, TweakMode,
};
use bdev::{
    Bdev, BdevError, BdevGeometry, BoxedChannel, Completion, Durability, IoLimits, Registry, Request,
};
use block_io::{Channel, Op, Status};
use wire_nvme::protection::{self, MetadataFormat, Protection, ProtectionType, Tags};

use crate::units::parse_bytes;

/// What is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccelSource {
    /// `None` for a copy without the framework.
    pub op: Option<AccelOp>,
    /// Bytes of data of an operation, whole blocks.
    pub bytes: u32,
    /// Bytes of a data unit of encryption, or of a block with protection information.
    pub block_bytes: u32,
    /// Sources of the exclusive or.
    pub sources: u32,
}

/// Most bytes of an operation: memory of each channel is a few times that.
const BYTES_MAX: u32 = 16 << 20;
/// Operations of a run without a time limit.
const OPERATIONS: u64 = 1 << 20;
const SOURCES_MAX: u32 = 64;
const BYTES_DEFAULT: u32 = 4096;
/// Metadata of a block: protection information alone.
const METADATA_BYTES: usize = protection::SIZE;
const INTERLEAVED: MetadataFormat = MetadataFormat {
    bytes: METADATA_BYTES as u16,
    extended: true,
    protection: Some(Protection::new(ProtectionType::Type1, false)),
};
const TAGS: Tags = Tags { reference: 0, storage: 0, application: 0, application_mask: 0 };

impl AccelSource {
    /// Parses the part of an `accel:` URI after the colon: `OPERATION[?size=BYTES&block=BYTES&sources=N]`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(body: &str, query: &str) -> Result<AccelSource, String> {
        let op = AccelOp::from_name(body).filter(|op| accel::Engine::Software.supports(*op));
        if op.is_none() && body != "memcpy" {
            let known = AccelOp::ALL.into_iter().filter(|op| accel::Engine::Software.supports(*op));
            let names: Vec<&str> = known.map(AccelOp::name).collect();
            return Err(format!("names none of the operations {} and memcpy", names.join(", ")));
        }
        let mut source = AccelSource { op, bytes: BYTES_DEFAULT, block_bytes: 512, sources: 2 };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let size = || parse_bytes(value).and_then(|bytes| u32::try_from(bytes).ok());
            let set = match key {
                "size" => size().map(|bytes| source.bytes = bytes),
                "block" => size().map(|bytes| source.block_bytes = bytes),
                "sources" => value.parse().ok().map(|sources| source.sources = sources),
                _ => return Err(format!("?{key} is none of size, block and sources")),
            };
            set.ok_or_else(|| format!("{key}={value} is no number; for example accel:copy?size=4k"))?;
        }
        if !source.block_bytes.is_power_of_two() || !(16..=65536).contains(&source.block_bytes) {
            return Err(format!("block={} is no power of two from 16 to 65536", source.block_bytes));
        }
        // Only these have blocks; others take any whole words, which are the unit of a device's blocks.
        let unit = if source.has_blocks() { source.block_bytes } else { 8 };
        if source.bytes == 0 || source.bytes > BYTES_MAX || !source.bytes.is_multiple_of(unit) {
            let bytes = source.bytes;
            return Err(format!("size={bytes} is no multiple of {unit} bytes from {unit} to {BYTES_MAX}"));
        }
        if !(1..=SOURCES_MAX).contains(&source.sources) {
            return Err(format!("sources={} is not from 1 to {SOURCES_MAX}", source.sources));
        }
        Ok(source)
    }

    fn has_blocks(&self) -> bool {
        use AccelOp::{
            Decrypt, DifGenerate, DifGenerateCopy, DifVerify, DifVerifyCopy, DixGenerate, DixVerify, Encrypt,
        };
        matches!(
            self.op,
            Some(
                Encrypt
                    | Decrypt
                    | DifVerify
                    | DifVerifyCopy
                    | DifGenerate
                    | DifGenerateCopy
                    | DixGenerate
                    | DixVerify
            )
        )
    }

    /// The bytes of an I/O of a job on this URI, unless the job has some of its own; `None` of other URIs.
    pub(crate) fn io_bytes_of(uri: &str) -> Option<u32> {
        let rest = uri.strip_prefix("accel:")?;
        let (body, query) = rest.split_once('?').unwrap_or((rest, ""));
        AccelSource::parse(body, query).ok().map(|source| source.bytes)
    }

    /// Creates the device.
    ///
    /// # Errors
    /// The name is in use.
    pub(crate) fn create(&self, registry: &Registry, name: &str) -> Result<(), BdevError> {
        let bdev = AccelBdev { source: self.clone(), accel: registry.accel().clone() };
        registry.register(name, None, &[], Arc::new(bdev)).map(|_| ())
    }
}

/// The device of an operation.
struct AccelBdev {
    source: AccelSource,
    accel: Accel,
}

impl Bdev for AccelBdev {
    fn product_name(&self) -> &'static str {
        "Acceleration operation"
    }

    fn geometry(&self) -> BdevGeometry {
        BdevGeometry::new(self.source.bytes, OPERATIONS)
    }

    fn durability(&self) -> Durability {
        Durability::None
    }

    fn supports(&self, op: Op) -> bool {
        matches!(op, Op::Read | Op::Write)
    }

    fn open(&self, core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        let channel = self.accel.channel(core.index());
        let work = AccelOperation::new(&self.source)
            .map_err(|reason| BdevError::Invalid { field: "filename", reason })?;
        let device = DeviceWork::new(self.accel.queue(core), core.pool(), self.source.bytes as usize);
        Ok(Box::new(AccelDeviceChannel { channel, work, device, completed: Vec::new() }))
    }

    fn io_limits(&self) -> IoLimits {
        IoLimits { transfer_bytes_max: self.source.bytes, ..IoLimits::NONE }
    }

    fn reads_undefined(&self) -> bool {
        true
    }
}

/// An operation with the memory that it works on.
struct AccelOperation {
    source: AccelSource,
    from: Vec<u8>,
    to: Vec<u8>,
    /// The other destination of `dualcast`, or separate metadata.
    other: Vec<u8>,
    /// Blocks with their metadata after each, which is valid.
    blocks: Vec<u8>,
    sources: Vec<Vec<u8>>,
    key: Option<CryptoKey>,
    lba: u64,
}

impl AccelOperation {
    fn new(source: &AccelSource) -> Result<AccelOperation, String> {
        let (bytes, block) = (source.bytes as usize, source.block_bytes as usize);
        let count = if source.has_blocks() { bytes / block } else { 0 };
        let from: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
        let mut blocks = Vec::with_capacity(bytes + count * METADATA_BYTES);
        for data in from.chunks_exact(block).take(count) {
            blocks.extend_from_slice(data);
            blocks.extend_from_slice(&[0; METADATA_BYTES]);
        }
        let mut other = vec![0; bytes];
        if count > 0 {
            protection::generate_extended(&INTERLEAVED, block, &mut blocks, &TAGS);
            other.truncate(count * METADATA_BYTES);
            protection::generate(&separate(), block, &from, &mut other, &TAGS);
        }
        let key = match source.op {
            Some(AccelOp::Encrypt | AccelOp::Decrypt) => Some(key()?),
            _ => None,
        };
        let is_xor = source.op == Some(AccelOp::Xor);
        let sources = (0..if is_xor { source.sources } else { 0 }).map(|_| from.clone()).collect();
        // What is compared is equal, so that all of it is looked at.
        let to = from.clone();
        Ok(AccelOperation { source: source.clone(), from, to, other, blocks, sources, key, lba: 0 })
    }

    /// Executes the operation once.
    #[inline]
    fn execute(&mut self, channel: &AccelChannel) -> Result<(), AccelFailure> {
        let block = self.source.block_bytes as usize;
        let Some(op) = self.source.op else {
            std::hint::black_box(&mut self.to).copy_from_slice(std::hint::black_box(&self.from));
            return Ok(());
        };
        match op {
            AccelOp::Copy => channel.copy(std::hint::black_box(&mut self.to), &self.from),
            AccelOp::Fill => channel.fill(std::hint::black_box(&mut self.to), FILL),
            AccelOp::Dualcast => channel.dualcast(&mut self.to, &mut self.other, &self.from),
            AccelOp::Compare => {
                channel.compare(&self.to, &self.from).map(|is_equal| _ = std::hint::black_box(is_equal))
            }
            AccelOp::Crc32c => channel.crc32c(&self.from).map(|checksum| _ = std::hint::black_box(checksum)),
            AccelOp::CopyCrc32c => {
                let checksum = channel.copy_crc32c(&mut self.to, &self.from);
                checksum.map(|checksum| _ = std::hint::black_box(checksum))
            }
            AccelOp::Xor => {
                let mut sources = [&self.from[..]; SOURCES_MAX as usize];
                sources.iter_mut().zip(&self.sources).for_each(|(slice, source)| *slice = source);
                channel.xor(&mut self.to, &sources[..self.sources.len()])
            }
            AccelOp::Encrypt | AccelOp::Decrypt => {
                let Some(key) = &self.key else { return Err(AccelFailure::Failed { errno: ENOKEY }) };
                self.lba = self.lba.wrapping_add(1);
                match op {
                    AccelOp::Encrypt => channel.encrypt(key, &mut self.to, block, self.lba),
                    _ => channel.decrypt(key, &mut self.to, block, self.lba),
                }
            }
            AccelOp::DifVerify => channel.dif_verify(&INTERLEAVED, block, &self.blocks, &TAGS),
            AccelOp::DifVerifyCopy => {
                channel.dif_verify_copy(&INTERLEAVED, block, &mut self.to, &self.blocks, &TAGS)
            }
            AccelOp::DifGenerate => channel.dif_generate(&INTERLEAVED, block, &mut self.blocks, &TAGS),
            AccelOp::DifGenerateCopy => {
                channel.dif_generate_copy(&INTERLEAVED, block, &mut self.blocks, &self.from, &TAGS)
            }
            AccelOp::DixGenerate => {
                channel.dix_generate(&separate(), block, &self.from, &mut self.other, &TAGS)
            }
            AccelOp::DixVerify => channel.dix_verify(&separate(), block, &self.from, &self.other, &TAGS),
            // They have no engine, and are no URI.
            AccelOp::Compress | AccelOp::Decompress => Err(AccelFailure::Failed { errno: ENOTSUP }),
        }
    }
}

/// What `fill` writes.
const FILL: u8 = 0xa5;
const ENOTSUP: i32 = 95;
const ENOKEY: i32 = 126;

const fn separate() -> MetadataFormat {
    MetadataFormat { extended: false, ..INTERLEAVED }
}

/// A key of AES-256-XTS, which protects nothing.
fn key() -> Result<CryptoKey, String> {
    let digits = |first: usize| (0..32).map(|at| format!("{:02x}", first + at)).collect::<String>();
    let (one, other) = (digits(0), digits(100));
    let mode = TweakMode::SimpleLba;
    CryptoKey::from_hex("perf", Cipher::AesXts, mode, one.as_bytes(), Some(other.as_bytes()))
        .map_err(|error| error.to_string())
}

/// Memory that a device can reach, and the operations that it executes on it.
struct DeviceWork {
    queue: AccelQueue,
    /// What is copied from, and to; `None` if the pool has no buffers of that size.
    memory: Option<Rc<Vec<dma::Buffer>>>,
    parts: Vec<IoatOp>,
    outcomes: Vec<DeviceOutcome>,
}

impl DeviceWork {
    fn new(queue: AccelQueue, pool: &dma::Pool, bytes: usize) -> DeviceWork {
        let memory: Option<Vec<_>> = (0..2).map(|_| pool.take(bytes)).collect();
        DeviceWork { queue, memory: memory.map(Rc::new), parts: Vec::new(), outcomes: Vec::new() }
    }

    /// Queues the operation, which a device takes.
    ///
    /// # Errors
    /// The request, for the CPU.
    fn submit(&mut self, op: AccelOp, request: Request) -> Result<(), Request> {
        let Some(memory) = &self.memory else { return Err(request) };
        let addresses = (self.queue.buffer_address(&memory[0]), self.queue.buffer_address(&memory[1]));
        let (Some(from), Some(to)) = addresses else { return Err(request) };
        let bytes = memory[1].len() as u64;
        self.parts.clear();
        self.parts.push(match op {
            AccelOp::Copy => IoatOp::Copy { from, to, bytes },
            AccelOp::Fill => IoatOp::Fill { pattern: u64::from_ne_bytes([FILL; 8]), to, bytes },
            _ => return Err(request),
        });
        self.queue.submit(&mut self.parts, request, Some(memory.clone()))
    }
}

struct AccelDeviceChannel {
    channel: AccelChannel,
    work: AccelOperation,
    device: DeviceWork,
    completed: Vec<Completion>,
}

impl AccelDeviceChannel {
    #[inline]
    fn execute(&mut self, request: Request) {
        let status = match self.work.execute(&self.channel) {
            Ok(()) => Status::SUCCESS,
            Err(AccelFailure::Protection(status)) => status,
            Err(AccelFailure::Failed { .. }) => Status::INTERNAL_ERROR,
        };
        self.completed.push(request.complete(status));
    }

    /// Completes what a device has executed, and executes what it has failed at.
    fn poll_device(&mut self, op: AccelOp) {
        let mut outcomes = std::mem::take(&mut self.device.outcomes);
        self.device.queue.poll(&mut outcomes);
        for DeviceOutcome { request, result } in outcomes.drain(..) {
            match result {
                Ok(()) => {
                    self.channel.executed(op, self.work.source.bytes.into());
                    self.completed.push(request.complete(Status::SUCCESS));
                }
                Err(DeviceFailure::Stopped) => self.execute(request),
                Err(DeviceFailure::Running) => {
                    self.channel.failed(op);
                    self.completed.push(request.complete(Status::INTERNAL_ERROR));
                }
            }
        }
        self.device.outcomes = outcomes;
    }
}

impl Channel for AccelDeviceChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        match self.work.source.op.filter(|op| self.device.queue.takes(*op)) {
            None => batch.drain(..).for_each(|request| self.execute(request)),
            Some(op) => {
                for request in batch.drain(..) {
                    if let Err(request) = self.device.submit(op, request) {
                        self.execute(request);
                    }
                }
                self.device.queue.flush();
            }
        }
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        if self.device.queue.in_flight() > 0
            && let Some(op) = self.work.source.op
        {
            self.poll_device(op);
        }
        let count = self.completed.len();
        sink.append(&mut self.completed);
        count
    }

    fn deadline(&self) -> Option<u64> {
        (!self.completed.is_empty() || self.device.queue.in_flight() > 0).then_some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_of_the_software_engine_can_be_measured_and_is_counted() {
        let accel = Accel::default();
        let channel = accel.channel(0);
        let known = AccelOp::ALL.into_iter().filter(|op| accel::Engine::Software.supports(*op));
        for op in known {
            let source = AccelSource::parse(op.name(), "size=8k&block=4k&sources=3").unwrap();
            let mut work = AccelOperation::new(&source).unwrap();
            for _ in 0..2 {
                work.execute(&channel).unwrap();
            }
            let stats = accel.stats()[op.index()];
            assert_eq!((stats.executed, stats.failed), (2, 0), "{}", op.name());
            assert!(stats.bytes >= 16384, "{}: {} bytes", op.name(), stats.bytes);
        }
    }

    #[test]
    fn memcpy_is_not_of_the_framework() {
        let accel = Accel::default();
        let source = AccelSource::parse("memcpy", "").unwrap();
        AccelOperation::new(&source).unwrap().execute(&accel.channel(0)).unwrap();
        assert!(accel.stats().iter().all(|stats| stats.executed == 0));
    }

    #[test]
    fn what_is_no_operation_is_rejected_with_the_reason() {
        for (body, query, reason) in [
            ("", "", "none of the operations copy, fill"),
            ("compress", "", "none of the operations"),
            ("copy", "size=0", "no multiple of 8"),
            ("copy", "size=17m", "no multiple of 8"),
            ("encrypt", "size=4k&block=8k", "no multiple of 8192"),
            ("encrypt", "block=100", "no power of two"),
            ("xor", "sources=65", "from 1 to 64"),
            ("copy", "size=x", "accel:copy?size=4k"),
            ("copy", "bs=4k", "none of size, block"),
        ] {
            let error = AccelSource::parse(body, query).unwrap_err();
            assert!(error.contains(reason), "{body}?{query}: {error}");
        }
        assert_eq!(AccelSource::io_bytes_of("accel:copy?size=64k"), Some(65536));
        assert_eq!(AccelSource::io_bytes_of("accel:crc32c"), Some(4096));
        assert_eq!(AccelSource::io_bytes_of("null:1g"), None);
    }
}
