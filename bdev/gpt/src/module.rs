//! Examination and methods.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, mpsc};

use bdev::rpc::{BdevModule, STILL_OPEN, conclude};
use bdev::stacking::PartBdev;
use bdev::{BlockDevice, Closing, DiskReadError, DiskReader, Registry};
use control::json::{Value, json};
use control::{CallRecorder, Examination, Method, Module, RpcError};
use reactor::ReactorHandle;
use wire_gpt::{GptTable, PartitionType};

use crate::parts::{ClaimedBases, GptPart, PartTypes, is_of_spdk, parts_of};
use crate::search::{FoundTable, NoTable, SearchStep, TableSearch};

/// Most requests, so that calls for bases that never come take a bounded amount of memory.
const REQUESTS_MAX: usize = 65_536;

/// Partitions as a [`Module`]: those of SPDK's types appear with their base, others by request.
pub struct GptModule {
    inner: Arc<GptInner>,
    bdevs: Arc<BdevModule>,
    recorder: CallRecorder,
}

struct GptInner {
    registry: Registry,
    /// `None` without a reactor, where nothing can be read.
    reader: Option<DiskReader>,
    state: Arc<Mutex<GptState>>,
}

#[derive(Default)]
struct GptState {
    requests: BTreeSet<PartRequest>,
    claimed: ClaimedBases,
}

/// A request for partitions.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct PartRequest {
    /// Name of the base, or, of one that was not there, an alias or its UUID.
    base: String,
    types: PartTypes,
}

impl PartRequest {
    /// The name under which its call is recorded.
    fn key(&self) -> String {
        format!("{} {}", self.base, self.types)
    }

    fn is_of(&self, device: &BlockDevice) -> bool {
        device.name() == self.base
            || device.aliases().contains(&self.base)
            || device.uuid().to_string().eq_ignore_ascii_case(&self.base)
    }
}

/// What came of the search on a device.
#[derive(Debug, thiserror::Error)]
enum NoTableRead {
    #[error(transparent)]
    None(#[from] NoTable),
    #[error(transparent)]
    Read(#[from] DiskReadError),
}

impl GptModule {
    /// Examines the devices of `bdevs` on the first of the reactors; without one there are no partitions.
    pub fn new(bdevs: &Arc<BdevModule>, reactors: &[ReactorHandle]) -> Arc<GptModule> {
        let registry = bdevs.registry().clone();
        let reader = reactors.first().map(|reactor| DiskReader::new(registry.clone(), reactor.clone()));
        let state: Arc<Mutex<GptState>> = Arc::default();
        let requested = state.clone();
        let recorder = bdevs
            .saved_calls()
            .recorder(move |key| sync::lock(&requested).requests.iter().any(|request| request.key() == key));
        let inner = Arc::new(GptInner { registry, reader, state });
        Arc::new(GptModule { inner, bdevs: bdevs.clone(), recorder })
    }
}

impl Module for GptModule {
    const NAME: &'static str = "bdev_gpt";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];

    fn methods() -> Vec<Method<GptModule>> {
        vec![
            Method::prepared_update("bdev_gpt_create", prepare_create, create)
                .text(
                    "Makes bdevs `BASEp1`, `BASEp2`, … of the partitions of a type, at once or when the base appears, and again when it returns. Those of SPDK's types appear without it. Not in SPDK.",
                    "array of the names of the partitions of that type; empty if the base is not there yet",
                )
                .canonical(|module: &GptModule, params: &mut GptParams| {
                    params.part_type = parse_types(&params.part_type)?.to_string();
                    params.base_bdev_name = module.inner.registry.name_of(&params.base_bdev_name);
                    Ok(())
                })
                .errors(&[
                    (RpcError::EEXIST, "that was requested already, or a name or UUID is in use"),
                    (RpcError::EBUSY, "the base bdev is claimed"),
                    (RpcError::ENODEV, "the base has no partition of that type"),
                    (RpcError::EINVAL, "the type is none, or the base has no partition table, or protection information"),
                    (RpcError::EIO, "the base cannot be read"),
                    (RpcError::ENOMEM, "too many requests"),
                ]),
            Method::concluded_update("bdev_gpt_delete", delete, conclude)
                .text(
                    "Ends a request of `bdev_gpt_create`, and deletes the bdevs that are there by it alone. I/O in flight completes first. Not in SPDK.",
                    "true",
                )
                .canonical(|module: &GptModule, params: &mut GptParams| {
                    params.part_type = parse_types(&params.part_type)?.to_string();
                    params.base_bdev_name = module.inner.registry.name_of(&params.base_bdev_name);
                    Ok(())
                })
                .errors(&[(RpcError::ENODEV, "that was not requested"), STILL_OPEN]),
        ]
    }

    fn examine_disk(&self, bdev: &str, examination: Examination) {
        let inner = &self.inner;
        let (Some(reader), Some(device)) = (&inner.reader, inner.registry.find(bdev)) else { return };
        if let Some(table) = inner.state().claimed.table(&device) {
            // What is requested and was not there, such as one whose name was in use.
            let inner = inner.clone();
            return examination.finish(move || inner.apply(&device, &table));
        }
        if device.claim().is_some() || device.geometry().metadata.protection.is_some() {
            return;
        }
        let inner = inner.clone();
        read_table(reader, &device.clone(), move |result| match result {
            Ok(found) => {
                warn_of_backup(&device, &found);
                let table = Arc::new(found.table);
                examination.finish(move || inner.apply(&device, &table));
            }
            Err(NoTableRead::None(error @ (NoTable::Broken { .. } | NoTable::OtherSize { .. }))) => {
                let name = device.name();
                log::warn!(target: "bdev", "the partition table of {name} is not used: {error}");
            }
            Err(error) => log::debug!(target: "bdev", "{} has no partition table: {error}", device.name()),
        });
    }

    fn stop(&self) {
        // The partitions go with their bases.
        self.inner.state().requests.clear();
    }

    fn report(&self) -> Value {
        let devices = self.inner.registry.list();
        let is_partition = |device: &&Arc<BlockDevice>| device.module::<PartBdev<GptPart>>().is_some();
        json!({ "partitions": devices.iter().filter(is_partition).count() })
    }
}

impl GptInner {
    fn state(&self) -> MutexGuard<'_, GptState> {
        // Each change is whole before anything can panic.
        sync::lock(&self.state)
    }

    /// Makes bdevs of the partitions that are due. What fails is logged.
    fn apply(&self, device: &Arc<BlockDevice>, table: &Arc<GptTable>) {
        let mut state = self.state();
        let GptState { requests, claimed } = &mut *state;
        let types: Vec<PartTypes> =
            requests.iter().filter(|request| request.is_of(device)).map(|request| request.types).collect();
        let exposed = claimed.expose(&self.registry, device, table, |entry| {
            is_of_spdk(entry) || types.iter().any(|types| types.contain(entry))
        });
        match exposed {
            Ok(exposed) => {
                for (name, error) in exposed.failed {
                    log::warn!(target: "bdev", "the partition {name} is no bdev: {error}");
                }
            }
            Err(error) => {
                log::warn!(target: "bdev", "the partitions of {} are no bdevs: {error}", device.name());
            }
        }
    }
}

fn warn_of_backup(device: &BlockDevice, found: &FoundTable) {
    if let Some(error) = &found.primary {
        let name = device.name();
        log::warn!(target: "bdev", "the backup partition table of {name} is used; the primary one: {error}");
    }
}

/// Reads the table of a device, and calls `then`, on the core of the reader.
fn read_table(
    reader: &DiskReader,
    device: &Arc<BlockDevice>,
    then: impl FnOnce(Result<FoundTable, NoTableRead>) + Send + 'static,
) {
    let geometry = device.geometry();
    let (search, step) = TableSearch::new(geometry.blocks, geometry.block_size);
    advance(reader.clone(), device.name().to_string(), search, step, Box::new(then));
}

type Then = Box<dyn FnOnce(Result<FoundTable, NoTableRead>) + Send>;

fn advance(reader: DiskReader, bdev: String, mut search: TableSearch, step: SearchStep, then: Then) {
    match step {
        SearchStep::Found(found) => then(Ok(found)),
        SearchStep::Nothing(nothing) => then(Err(nothing.into())),
        SearchStep::Read { lba, blocks } => {
            let (next, name) = (reader.clone(), bdev.clone());
            reader.read(&bdev, lba, blocks, move |read| {
                let step = match read {
                    Ok(data) => search.read(Some(&data)),
                    // The other table may be readable.
                    Err(DiskReadError::Failed { .. }) if lba > 0 => search.read(None),
                    Err(error) => return then(Err(error.into())),
                };
                advance(next, name, search, step, then);
            });
        }
    }
}

control::parameters! {
    struct GptParams {
        /// Device with the partition table
        base_bdev_name: String,
        /// GUID of the partitions' type, or one of the names spdk, spdk-old, efi, bios-boot, linux, swap,
        /// lvm, raid, linux-home, microsoft-basic, microsoft-reserved and freebsd-zfs; or `all`
        part_type: String,
    }
}

fn parse_types(text: &str) -> Result<PartTypes, RpcError> {
    PartTypes::parse(text).ok_or_else(|| {
        let names: Vec<&str> = PartitionType::names().collect();
        let names = names.join(", ");
        let message =
            format!("part_type: {text} is not a GUID, `all` or the name of a type, which are {names}");
        RpcError::new(RpcError::EINVAL, message)
    })
}

/// The table that a device has, or why it has none.
type SearchResult = Result<Arc<GptTable>, NoTableRead>;

/// A call for which the table was read.
struct PreparedCreate {
    params: GptParams,
    types: PartTypes,
    /// The device with its table; `None` if it is not there.
    found: Option<(Arc<BlockDevice>, SearchResult)>,
}

fn prepare_create(module: &GptModule, params: GptParams) -> Result<PreparedCreate, RpcError> {
    let (inner, types) = (&module.inner, parse_types(&params.part_type)?);
    let Some(device) = inner.registry.find(&params.base_bdev_name) else {
        return Ok(PreparedCreate { params, types, found: None });
    };
    let known = inner.state().claimed.table(&device);
    let table = match known {
        Some(table) => Ok(table),
        None => {
            let reader = inner.reader.as_ref().ok_or_else(|| {
                RpcError::new(RpcError::EIO, "there is no reactor that could read the device")
            })?;
            let (sender, receiver) = mpsc::channel();
            read_table(reader, &device, move |result| drop(sender.send(result)));
            // Each read ends in time.
            let result = reactor::blocking::receive(&receiver);
            let result = result.unwrap_or(Err(DiskReadError::Unavailable.into()));
            result.map(|found| {
                warn_of_backup(&device, &found);
                Arc::new(found.table)
            })
        }
    };
    Ok(PreparedCreate { params, types, found: Some((device, table)) })
}

fn create(module: &GptModule, prepared: PreparedCreate) -> Result<Vec<String>, RpcError> {
    let PreparedCreate { mut params, types, found } = prepared;
    let registry = &module.inner.registry;
    params.part_type = types.to_string();
    params.base_bdev_name = registry.name_of(&params.base_bdev_name);
    let request = PartRequest { base: params.base_bdev_name.clone(), types };
    let mut state = module.inner.state();
    if state.requests.contains(&request) {
        let message = format!("{} partitions of {} are requested already", request.types, request.base);
        return Err(RpcError::new(RpcError::EEXIST, message));
    }
    if state.requests.len() >= REQUESTS_MAX {
        let message = format!("there are {REQUESTS_MAX} requests for partitions already");
        return Err(RpcError::new(RpcError::ENOMEM, message));
    }
    let names = match found {
        // One that went meanwhile is as one that has not come: its examination makes the partitions.
        Some((device, table)) if !device.is_removed() => {
            let table = table.map_err(|error| {
                let code = if let NoTableRead::None(_) = error { RpcError::EINVAL } else { RpcError::EIO };
                RpcError::new(code, format!("{} has no partition table: {error}", device.name()))
            })?;
            expose_requested(registry, &mut state.claimed, &device, &table, types)?
        }
        _ => {
            log::info!(target: "bdev", "partitions of {} are bdevs when it appears", request.base);
            Vec::new()
        }
    };
    let key = request.key();
    state.requests.insert(request);
    drop(state);
    module.recorder.record(&key, "bdev_gpt_create", &params);
    Ok(names)
}

/// All partitions of the type, or none of them and an error.
fn expose_requested(
    registry: &Registry,
    claimed: &mut ClaimedBases,
    device: &Arc<BlockDevice>,
    table: &Arc<GptTable>,
    types: PartTypes,
) -> Result<Vec<String>, RpcError> {
    let exposed = claimed.expose(registry, device, table, |entry| types.contain(entry))?;
    if let Some((_, error)) = exposed.failed.into_iter().next() {
        exposed.created.iter().for_each(|part| drop(registry.unregister(part.name())));
        return Err(error.into());
    }
    if exposed.names.is_empty() {
        let message = format!("{} has no partition of the type {types}", device.name());
        return Err(RpcError::new(RpcError::ENODEV, message));
    }
    Ok(exposed.names)
}

fn delete(module: &GptModule, params: GptParams) -> Result<Closing, RpcError> {
    let (registry, types) = (&module.inner.registry, parse_types(&params.part_type)?);
    let device = registry.find(&params.base_bdev_name);
    let mut state = module.inner.state();
    let is_meant = |request: &&PartRequest| {
        let is_of = device.as_ref().is_some_and(|device| request.is_of(device));
        request.types == types && (is_of || request.base == params.base_bdev_name)
    };
    let Some(request) = state.requests.iter().find(is_meant).cloned() else {
        let message = format!("partitions {types} of {} are not requested", params.base_bdev_name);
        return Err(RpcError::new(RpcError::ENODEV, message));
    };
    state.requests.remove(&request);
    let others: Vec<PartRequest> = state.requests.iter().cloned().collect();
    drop(state);
    module.recorder.remove(&request.key());
    let mut removed = Vec::new();
    for (part, entry) in device.iter().flat_map(|device| parts_of(registry, device)) {
        let is_other = |other: &PartRequest| {
            device.as_ref().is_some_and(|device| other.is_of(device)) && other.types.contain(&entry)
        };
        if types.contain(&entry) && !is_of_spdk(&entry) && !others.iter().any(is_other) {
            // One that another thread removes at this moment is gone as well.
            removed.extend(registry.unregister(part.name()).ok());
            module.bdevs.forget(part.name());
        }
    }
    Ok(Closing::removed(removed))
}
