//! The methods: SPDK's `bdev_raid_*`.

use std::sync::Arc;
use std::time::Duration;

use bdev::rpc::STILL_OPEN;
use bdev::stacking::BaseBdev;
use bdev::{BdevError, BlockDevice, Closing, InfoValue, Uuid};
use control::json::{Map, Value, json};
use control::{ByName, Method, RpcError};
use wire_raid::{MemberState, NAME_BYTES_MAX, RaidSuperblock};

use crate::array::{ArrayPhase, ArraySlot, Candidate, RaidArray};
use crate::level::{check_level, is_redundant, members_min, parse_level};
use crate::member_age::MemberOnDisk;
use crate::module::{EPERM, RaidError, RaidModule, RaidOptions};
use crate::on_disk::{NoSuperblock, can_have_superblock, is_unavailable, read_member_now, wipe_writes};

/// How long a removal waits for its record in the superblocks.
const RECORD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a deletion waits for a mirror to be marked clean.
const CLEAN_TIMEOUT: Duration = Duration::from_secs(2);

const MISSING: (i64, &str) = (RpcError::ENODEV, "there is no such array");
const UNREAD: (i64, &str) = (RpcError::EIO, "a superblock cannot be read or written");

pub(crate) fn methods() -> Vec<Method<RaidModule>> {
    vec![
        Method::prepared_update("bdev_raid_create", prepare_create, create)
            .text(
                "Makes an array of bdevs, at once or when the last of them appears. Without a superblock the call is saved, and the array returns with its members; a superblock makes it known to examination instead.",
                "true",
            )
            .assigns(&["uuid"])
            .canonical(|module: &RaidModule, params: &mut RaidCreate| {
                if let Some(level) = parse_level(&params.raid_level) {
                    params.raid_level = crate::level::level_name(level).to_string();
                }
                let registry = &module.arrays.registry;
                params.base_bdevs.iter_mut().for_each(|base| *base = registry.name_of(base));
                Ok(())
            })
            .errors(&[
                (RpcError::EEXIST, "the name or UUID is in use, or a member has the superblock of another array"),
                (RpcError::EBUSY, "a member is claimed"),
                (RpcError::EINVAL, "the level does not allow this, or the members do not fit each other"),
                UNREAD,
            ]),
        Method::concluded_update("bdev_raid_delete", delete, conclude_delete)
            .text(
                "Deletes an array. Its superblocks stay, so that it returns when its members are examined, unless `clear_sb` is set. I/O in flight completes first; a copy ends.",
                "true",
            )
            .errors(&[MISSING, STILL_OPEN, UNREAD]),
        Method::query("bdev_raid_get_bdevs", get_bdevs)
            .text("Describes the arrays of a state.", "array of arrays, sorted by name"),
        Method::prepared_update("bdev_raid_add_base_bdev", prepare_add, add).text(
            "Adds a member to an array that lacks one. A mirror that is online copies to it; the call does not wait for that.",
            "true",
        )
        .errors(&[
            (RpcError::ENODEV, "there is no such array or bdev"),
            (EPERM, "the array copies to a member already"),
            (RpcError::EINVAL, "the array lacks none, or the bdev does not fit"),
            (RpcError::EBUSY, "the bdev is claimed"),
            (RpcError::EEXIST, "the bdev is a member already, or has the superblock of another array"),
            UNREAD,
        ]),
        Method::concluded_update("bdev_raid_remove_base_bdev", remove, conclude_remove)
            .text(
                "Removes a member. A mirror does without it; an array that cannot goes offline, and so does a mirror with its last member.",
                "true",
            )
            .errors(&[
                (RpcError::ENODEV, "it is no member of an array"),
                (
                    RpcError::EINPROGRESS,
                    "it is removed, and the superblocks of the others do not say so yet, or I/O in flight uses it still",
                ),
            ]),
        Method::update("bdev_raid_start_degraded", |module: &RaidModule, params: ByName| {
            let not_found = || RaidError::NotFound { name: params.name.clone() };
            let array = module.arrays.find(&params.name).ok_or_else(not_found)?;
            module.arrays.start_degraded(&array)?;
            record_members(module, &array);
            Ok(true)
        })
        .text(
            "Starts a raid1 or raid5f that waits for members without them: after a restart with a broken disk. They are recorded as missing, and are copied to when they return. Not in SPDK.",
            "true",
        )
        .errors(&[MISSING, (RpcError::EINVAL, "it is no redundant array that waits for members, or has too few"), UNREAD]),
        Method::update("bdev_raid_set_options", set_options)
            .text("Sets options of arrays that start later. What is left out stays as it is.", "true")
            .canonical(|_: &RaidModule, params: &mut SetOptions| {
                let saved = saved_options(with(RaidOptions::default(), params));
                *params = saved;
                Ok(())
            })
            .errors(&[(RpcError::EINVAL, "the window is 0")])
            .at_any_stage(),
    ]
}

control::choices! {
    /// What is copied when a mirror starts.
    enum ResyncMode {
        Bitmap = "bitmap",
        Full = "full",
    }
}

control::parameters! {
    struct RaidCreate {
        /// Name, of 63 bytes at most
        name: String,
        /// Size of a strip, a power of two; for all but raid1
        strip_size_kb: u32 ["KiB"] = 0,
        /// raid0, raid1, raid5f or concat; also 0, 1 and 5f
        raid_level: String,
        /// The members
        base_bdevs: Vec<String>,
        /// UUID; without, a random one
        uuid: Option<Uuid>,
        /// Whether each member gets a superblock, from which the array is made again
        superblock: bool = false,
        /// `full` copies the first member of a mirror to the others, or makes the parity of raid5f; `bitmap`
        /// takes them to be right. Not in SPDK
        resync: ResyncMode = ResyncMode::Bitmap,
    }
}

/// A call for which the members that are there were read.
struct PreparedCreate {
    params: RaidCreate,
    found: Vec<(Arc<BlockDevice>, Result<MemberOnDisk, NoSuperblock>)>,
}

fn prepare_create(module: &RaidModule, params: RaidCreate) -> Result<PreparedCreate, RpcError> {
    let mut found = Vec::new();
    if params.superblock {
        for name in &params.base_bdevs {
            if let Some(device) = module.arrays.registry.find(name) {
                let read = read_superblock(module, &device)?;
                found.push((device, read));
            }
        }
    }
    Ok(PreparedCreate { params, found })
}

fn read_superblock(
    module: &RaidModule,
    device: &Arc<BlockDevice>,
) -> Result<Result<MemberOnDisk, NoSuperblock>, RaidError> {
    let reader = module.arrays.reader.as_ref().ok_or(RaidError::Unavailable)?;
    if !can_have_superblock(device) {
        let reason = format!("{} has metadata, with which there are no arrays", device.name());
        return Err(BdevError::Invalid { field: "base_bdevs", reason }.into());
    }
    match read_member_now(reader, device) {
        Err(error @ NoSuperblock::Read(_)) => {
            Err(RaidError::Unread { bdev: device.name().to_string(), error })
        }
        found => Ok(found),
    }
}

fn create(module: &RaidModule, prepared: PreparedCreate) -> Result<bool, RpcError> {
    let PreparedCreate { mut params, found } = prepared;
    let invalid = |field, reason: String| BdevError::Invalid { field, reason };
    let Some(level) = parse_level(&params.raid_level) else {
        let reason = format!("{} is none of raid0, raid1, raid5f and concat", params.raid_level);
        return Err(invalid("raid_level", reason).into());
    };
    if params.name.is_empty() || params.name.len() > NAME_BYTES_MAX {
        let reason = format!("{:?} is not a name of 1 to {NAME_BYTES_MAX} bytes", params.name);
        return Err(invalid("name", reason).into());
    }
    check_level(level, params.strip_size_kb, params.base_bdevs.len())?;
    check_names(module, &params.name, &params.base_bdevs)?;
    for (device, read) in &found {
        if let Ok(on_disk) = read {
            let RaidSuperblock { name, uuid, .. } = on_disk.superblock.clone();
            return Err(RaidError::ForeignSuperblock { bdev: device.name().to_string(), name, uuid }.into());
        }
    }
    // SPDK takes the nil UUID for none.
    let uuid = params.uuid.filter(|uuid| !uuid.is_nil()).unwrap_or_else(Uuid::new_v4);
    params.uuid = Some(uuid);
    let slot = |(place, name): (usize, &String)| {
        // As a mirror that does without a member is saved.
        let is_removed = is_redundant(level) && *name == removed_name(place);
        ArraySlot { name: (!is_removed).then(|| name.clone()), ..ArraySlot::default() }
    };
    let slots: Vec<ArraySlot> = params.base_bdevs.iter().enumerate().map(slot).collect();
    if slots.iter().all(|slot| slot.name.is_none()) {
        return Err(invalid("base_bdevs", "all members are removed ones".to_string()).into());
    }
    let named = slots.iter().filter(|slot| slot.name.is_some()).count();
    if named < members_min(level, slots.len()) {
        let reason = format!("{named} of {} members are none of an array", slots.len());
        return Err(invalid("base_bdevs", reason).into());
    }
    let resyncs_all = params.resync == ResyncMode::Full;
    let kind = (level, params.strip_size_kb);
    let array = RaidArray::new(&params.name, uuid, kind, params.superblock, resyncs_all, slots);
    module.arrays.insert(&array)?;
    if let Err(error) = configure_all(module, &array) {
        module.arrays.remove(&array);
        return Err(error.into());
    }
    if !array.has_superblock {
        record(module, &array, &params);
    }
    Ok(true)
}

/// A member must not be named twice, nor be the array.
fn check_names(module: &RaidModule, array: &str, names: &[String]) -> Result<(), BdevError> {
    let registry = &module.arrays.registry;
    let mut found = std::collections::BTreeSet::new();
    for name in names {
        if name.is_empty() || name == array || !found.insert(registry.name_of(name)) {
            let reason = match name.as_str() {
                "" => "the name of a member is empty".to_string(),
                name if name == array => format!("{name} cannot be a member of itself"),
                name => format!("{name} is named twice"),
            };
            return Err(BdevError::Invalid { field: "base_bdevs", reason });
        }
    }
    Ok(())
}

fn configure_all(module: &RaidModule, array: &Arc<RaidArray>) -> Result<(), RaidError> {
    let places = array.lock().slots.len();
    for place in 0..places {
        match module.arrays.configure(array, place) {
            Ok(()) => {}
            Err(error) if is_unavailable(&error) => {}
            Err(error) => return Err(error.into()),
        }
    }
    if array.is_complete() {
        module.arrays.start(array)?;
    } else {
        log::info!(target: "bdev_raid", "the array {} waits for its members", array.name);
    }
    Ok(())
}

/// Records the call of an array without a superblock, with its present members.
fn record(module: &RaidModule, array: &RaidArray, params: &RaidCreate) {
    module.recorder.record(&array.name, "bdev_raid_create", params);
}

/// The name of the member of a place in a saved call, after its removal; that of SPDK.
fn removed_name(place: usize) -> String {
    format!("removed_base_bdev_{place}")
}

/// The members of the recorded call: as SPDK names those that were removed.
fn record_members(module: &RaidModule, array: &RaidArray) {
    if array.has_superblock {
        return;
    }
    let state = array.lock();
    let name = |(place, slot): (usize, &ArraySlot)| match &slot.name {
        Some(name) => name.clone(),
        None => removed_name(place),
    };
    let names: Vec<Value> = state.slots.iter().enumerate().map(name).map(Value::from).collect();
    drop(state);
    module.recorder.set_parameter(&array.name, "base_bdevs", names);
}

control::parameters! {
    struct RaidDelete {
        /// Name of the array
        name: String,
        /// Whether the superblocks of its members are removed
        clear_sb: bool = false,
    }
}

/// What is left of a deletion.
struct DeletedArray {
    closing: Closing,
    /// Members whose superblocks are to be removed.
    wiped: Vec<(Arc<BlockDevice>, RaidSuperblock)>,
}

fn delete(module: &RaidModule, params: RaidDelete) -> Result<DeletedArray, RpcError> {
    let not_found = || RaidError::NotFound { name: params.name.clone() };
    let array = module.arrays.find(&params.name).ok_or_else(not_found)?;
    let (superblock, mut members) = {
        let state = array.lock();
        let bases = state.slots.iter().filter_map(|slot| slot.base.as_ref());
        let members: Vec<Arc<BlockDevice>> = bases.map(|base| base.device().clone()).collect();
        (state.superblock.clone(), members)
    };
    let mut closing = Closing::default();
    if array.phase() == ArrayPhase::Online {
        let mirror = array.lock().mirror.clone();
        if let Some(mirror) = mirror.filter(|_| !params.clear_sb) {
            mirror.clean_now(CLEAN_TIMEOUT);
        }
        let bases = bases_of(module, &array);
        members.extend(bases.iter().map(|base| base.device().clone()));
        closing = unregister(module, &array, &bases)?;
    }
    module.arrays.remove(&array);
    module.recorder.remove(&array.name);
    module.bdevs.forget(&array.name);
    let superblock = superblock.filter(|_| params.clear_sb);
    let wiped = superblock.map_or(Vec::new(), |superblock| {
        members.into_iter().map(|member| (member, superblock.clone())).collect()
    });
    Ok(DeletedArray { closing, wiped })
}

/// The members of an array that is online.
fn bases_of(module: &RaidModule, array: &RaidArray) -> Vec<Arc<BaseBdev>> {
    let device = module.arrays.registry.find(&array.name);
    let raid = device.as_deref().and_then(crate::bdev_of_array::raid_of);
    raid.map_or(Vec::new(), |raid| raid.bases().bases())
}

/// Ends an array that is online. Its members are closed after it: a copy has channels of its own.
fn unregister(module: &RaidModule, array: &RaidArray, bases: &[Arc<BaseBdev>]) -> Result<Closing, BdevError> {
    let of_members: Vec<Closing> = bases.iter().map(|base| base.closing()).collect();
    let removed = module.arrays.registry.unregister(&array.name)?;
    Ok(Closing::removed([removed]).and(of_members))
}

fn conclude_delete(module: &RaidModule, deleted: DeletedArray) -> Result<bool, RpcError> {
    deleted.closing.wait()?;
    let registry = &module.arrays.registry;
    let mut writes = Vec::new();
    for (device, superblock) in deleted.wiped.iter().filter(|(device, _)| !device.is_removed()) {
        let base = BaseBdev::claim(registry, device.name(), "bdev_raid_delete")?;
        writes.push((Arc::new(base), wipe_writes(superblock)));
    }
    if !writes.is_empty() {
        let bases: Vec<Arc<BaseBdev>> = writes.iter().map(|(base, _)| base.clone()).collect();
        let written = module.arrays.write_now(writes);
        let closing = Closing::default().and(bases.iter().map(|base| base.closing()));
        bases.iter().for_each(|base| base.release());
        written?;
        closing.wait()?;
    }
    Ok(true)
}

control::choices! {
    /// SPDK's states, or all.
    enum RaidCategory {
        All = "all",
        Online = "online",
        Configuring = "configuring",
        Offline = "offline",
    }
}

control::parameters! {
    struct GetBdevs {
        /// The state, or all
        category: RaidCategory,
    }
}

fn get_bdevs(module: &RaidModule, params: GetBdevs) -> Result<Vec<Value>, RpcError> {
    let wanted = match params.category {
        RaidCategory::All => None,
        RaidCategory::Online => Some(ArrayPhase::Online),
        RaidCategory::Configuring => Some(ArrayPhase::Configuring),
        RaidCategory::Offline => Some(ArrayPhase::Offline),
    };
    let arrays = module.arrays.all();
    let is_wanted = |array: &&Arc<RaidArray>| wanted.is_none_or(|phase| array.phase() == phase);
    Ok(arrays.iter().filter(is_wanted).map(|array| description(array)).collect())
}

fn description(array: &RaidArray) -> Value {
    let mut object = Map::new();
    object.insert("name".to_string(), json!(array.name));
    for (name, detail) in array.describe() {
        object.insert(name.to_string(), to_json(&detail));
    }
    Value::Object(object)
}

fn to_json(detail: &InfoValue) -> Value {
    match detail {
        InfoValue::Null => Value::Null,
        InfoValue::Bool(yes) => json!(yes),
        InfoValue::Number(number) => json!(number),
        InfoValue::Text(text) => json!(text),
        InfoValue::List(list) => list.iter().map(to_json).collect(),
        InfoValue::Object(members) => {
            Value::Object(members.iter().map(|(name, member)| (name.to_string(), to_json(member))).collect())
        }
    }
}

control::parameters! {
    struct AddMember {
        /// The array
        raid_bdev: String,
        /// The new member
        base_bdev: String,
    }
}

/// A call for which the new member was read.
struct PreparedAdd {
    params: AddMember,
    found: Option<(Arc<BlockDevice>, Option<MemberOnDisk>)>,
}

fn prepare_add(module: &RaidModule, params: AddMember) -> Result<PreparedAdd, RpcError> {
    let found = match module.arrays.registry.find(&params.base_bdev) {
        Some(device) => {
            let read = read_superblock(module, &device)?;
            Some((device, read.ok()))
        }
        None => None,
    };
    Ok(PreparedAdd { params, found })
}

fn add(module: &RaidModule, prepared: PreparedAdd) -> Result<bool, RpcError> {
    let PreparedAdd { params, found } = prepared;
    let not_found = || RaidError::NotFound { name: params.raid_bdev.clone() };
    let array = module.arrays.find(&params.raid_bdev).ok_or_else(not_found)?;
    let no_bdev = || BdevError::NotFound { name: params.base_bdev.clone() };
    let (device, on_disk) = found.ok_or_else(no_bdev)?;
    if module.arrays.array_of(&device).is_some_and(|(of_device, _)| Arc::ptr_eq(&of_device, &array)) {
        let (bdev, name) = (device.name().to_string(), array.name.clone());
        return Err(RaidError::IsMember { bdev, name }.into());
    }
    let mirror = array.lock().mirror.clone();
    if mirror.is_some_and(|mirror| mirror.is_copying()) {
        return Err(RaidError::Copying { name: array.name.clone() }.into());
    }
    if let Some(on_disk) = on_disk {
        let RaidSuperblock { name, uuid, .. } = on_disk.superblock.clone();
        if uuid != array.uuid {
            return Err(RaidError::ForeignSuperblock { bdev: device.name().to_string(), name, uuid }.into());
        }
        if array.phase() == ArrayPhase::Online {
            module.arrays.return_member(&array, &Candidate::new(&device, on_disk))?;
        } else {
            module.arrays.assemble(&device, on_disk)?;
        }
        return Ok(true);
    }
    if array.phase() == ArrayPhase::Online {
        module.arrays.add_member(&array, &device)?;
    } else {
        let place = {
            let mut state = array.lock();
            let is_free = |slot: &ArraySlot| {
                !slot.is_configured
                    && (slot.waits_for(&device) || (slot.name.is_none() && slot.uuid.is_nil()))
            };
            let place = state.slots.iter().position(is_free);
            if let Some(place) = place {
                state.slots[place].name = Some(device.name().to_string());
            }
            place
        };
        let place = place.ok_or_else(|| RaidError::NoFreeSlot { name: array.name.clone() })?;
        if let Err(error) = module.arrays.configure(&array, place) {
            array.lock().slots[place].name = None;
            return Err(error.into());
        }
        module.arrays.start_if_complete(&array);
    }
    record_members(module, &array);
    Ok(true)
}

control::parameters! {
    struct RemoveMember {
        /// The member
        name: String,
    }
}

/// What is left of the removal of a member.
enum RemovedMember {
    /// The array has not started, or has gone.
    Closing(Closing),
    /// A mirror does without it.
    Recording { array: Arc<RaidArray>, place: usize, closing: Closing },
}

fn remove(module: &RaidModule, params: RemoveMember) -> Result<RemovedMember, RpcError> {
    let no_member = || RaidError::NoMember { bdev: params.name.clone() };
    let device = module.bdevs.find(&params.name)?;
    let (array, place) = module.arrays.array_of(&device).ok_or_else(no_member)?;
    let mirror = array.lock().mirror.clone();
    if array.phase() != ArrayPhase::Online {
        module.arrays.forget_member(&array, place);
        return Ok(RemovedMember::Closing(Closing::default()));
    }
    if let Some(mirror) = mirror {
        let closing = mirror.closing(place);
        if mirror.lose(place, MemberState::Missing) {
            return Ok(RemovedMember::Recording { array, place, closing });
        }
    }
    array.lock().is_stopped = true;
    let bases = bases_of(module, &array);
    Ok(RemovedMember::Closing(unregister(module, &array, &bases)?))
}

fn conclude_remove(module: &RaidModule, removed: RemovedMember) -> Result<bool, RpcError> {
    match removed {
        RemovedMember::Closing(closing) => closing.wait()?,
        RemovedMember::Recording { array, place, closing } => {
            let mirror = array.lock().mirror.clone();
            if let Some(mirror) = mirror
                && !mirror.wait_removed(place, RECORD_TIMEOUT)
            {
                return Err(RaidError::NotRecorded.into());
            }
            record_members(module, &array);
            closing.wait()?;
        }
    }
    Ok(true)
}

control::parameters! {
    struct SetOptions {
        /// What a rebuild copies at a time; writes of that range wait meanwhile
        process_window_size_kb: Option<u32> ["KiB"],
        /// Most that a rebuild copies; 0 for no limit
        process_max_bandwidth_mb_sec: Option<u32> ["MiB/s"],
        /// `full` copies all of an array that is found by its superblock, `bitmap` what its bitmap says. Not
        /// in SPDK
        resync: Option<ResyncMode>,
    }
}

fn set_options(module: &RaidModule, params: SetOptions) -> Result<bool, RpcError> {
    let present = module.arrays.options();
    if params.process_window_size_kb == Some(0) {
        let reason = "0 is not a size".to_string();
        return Err(BdevError::Invalid { field: "process_window_size_kb", reason }.into());
    }
    let options = with(present, &params);
    module.arrays.set_options(options);
    module.options_recorder.record(OPTIONS, "bdev_raid_set_options", &saved_options(options));
    Ok(true)
}

/// Options with what a call sets.
fn with(present: RaidOptions, params: &SetOptions) -> RaidOptions {
    let bandwidth = params.process_max_bandwidth_mb_sec;
    RaidOptions {
        process_window_size_kb: params.process_window_size_kb.unwrap_or(present.process_window_size_kb),
        process_max_bandwidth_mb_sec: bandwidth.unwrap_or(present.process_max_bandwidth_mb_sec),
        resyncs_all: params.resync.map_or(present.resyncs_all, |mode| mode == ResyncMode::Full),
    }
}

/// The name under which the options are recorded.
const OPTIONS: &str = "options";

fn saved_options(options: RaidOptions) -> SetOptions {
    SetOptions {
        process_window_size_kb: Some(options.process_window_size_kb),
        process_max_bandwidth_mb_sec: Some(options.process_max_bandwidth_mb_sec),
        resync: Some(if options.resyncs_all { ResyncMode::Full } else { ResyncMode::Bitmap }),
    }
}
