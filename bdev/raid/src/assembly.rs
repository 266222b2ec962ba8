//! The arrays of the program: how they get their members, start and end.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use bdev::stacking::{BaseBdev, BaseSet};
use bdev::{BdevError, BlockDevice, DiskReader, Registry};
use reactor::ReactorHandle;
use uuid::Uuid;
use wire_raid::{IntentPage, MemberState, RaidLevel, RaidMember, RaidSuperblock};

use crate::array::{ArrayPhase, ArraySlot, ArrayState, Candidate, RaidArray};
use crate::bdev_of_array::{MemberLimits, RaidBdev, kind_of, raid_of, stack_all};
use crate::level::{check_level, is_redundant, members_min};
use crate::member_age::{MemberAges, MemberOnDisk};
use crate::mirror::{Mirror, MirrorSetup, NewMember};
use crate::module::{RaidError, RaidOptions};
use crate::on_disk::{
    MetadataWrite, excludes_all, has_bitmap, is_unavailable, page_write, superblock_write, wipe_pages,
    write_members_now,
};

/// The arrays, by name, and what they are made of.
pub(crate) struct Arrays {
    pub(crate) registry: Registry,
    /// `None` without a reactor, where nothing can be read.
    pub(crate) reader: Option<DiskReader>,
    reactors: Vec<ReactorHandle>,
    /// Not locked during calls of the registry, whose events lock it.
    table: Mutex<BTreeMap<String, Arc<RaidArray>>>,
    options: Mutex<RaidOptions>,
}

impl Arrays {
    pub(crate) fn new(registry: &Registry, reactors: &[ReactorHandle]) -> Arc<Arrays> {
        let reader = reactors.first().map(|reactor| DiskReader::new(registry.clone(), reactor.clone()));
        Arc::new(Arrays {
            registry: registry.clone(),
            reader,
            reactors: reactors.to_vec(),
            table: Mutex::default(),
            options: Mutex::default(),
        })
    }

    pub(crate) fn options(&self) -> RaidOptions {
        *sync::lock(&self.options)
    }

    pub(crate) fn set_options(&self, options: RaidOptions) {
        *sync::lock(&self.options) = options;
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<String, Arc<RaidArray>>> {
        // Each change is one call.
        sync::lock(&self.table)
    }

    /// All arrays, by name.
    pub(crate) fn all(&self) -> Vec<Arc<RaidArray>> {
        self.table().values().cloned().collect()
    }

    pub(crate) fn find(&self, name: &str) -> Option<Arc<RaidArray>> {
        if let Some(array) = self.table().get(name) {
            return Some(array.clone());
        }
        // By its UUID.
        let uuid = Uuid::try_parse(name).ok()?;
        self.by_uuid(uuid)
    }

    fn by_uuid(&self, uuid: Uuid) -> Option<Arc<RaidArray>> {
        self.table().values().find(|array| array.uuid == uuid).cloned()
    }

    /// Adds an array, whose name and UUID must be free.
    pub(crate) fn insert(&self, array: &Arc<RaidArray>) -> Result<(), RaidError> {
        let exists = |name: &str| Err(BdevError::Exists { name: name.to_string() }.into());
        if self.registry.find(&array.name).is_some() {
            return exists(&array.name);
        }
        let mut table = self.table();
        if table.contains_key(&array.name) {
            return exists(&array.name);
        }
        if table.values().any(|other| other.uuid == array.uuid) {
            return exists(&array.uuid.to_string());
        }
        table.insert(array.name.clone(), array.clone());
        Ok(())
    }

    /// Forgets an array that is not online, and releases its members.
    pub(crate) fn remove(&self, array: &RaidArray) {
        self.table().remove(&array.name);
        let mut state = array.lock();
        let bases: Vec<BaseBdev> = state.slots.iter_mut().filter_map(|slot| slot.base.take()).collect();
        state.slots.iter_mut().for_each(|slot| slot.is_configured = false);
        drop(state);
        drop(bases);
    }

    /// Gives a place of an array that has not started its member.
    ///
    /// # Errors
    /// [`BdevError::NotFound`] if it is not there; of the claim, and of [`RaidArray::check_member`].
    pub(crate) fn configure(&self, array: &RaidArray, place: usize) -> Result<(), BdevError> {
        let wanted = {
            let state = array.lock();
            let slot = &state.slots[place];
            match &slot.name {
                Some(name) => name.clone(),
                None => slot.uuid.to_string(),
            }
        };
        let base = BaseBdev::claim(&self.registry, &wanted, &array.claimant())?;
        let device = base.device().clone();
        let block_bytes = array.block_bytes();
        let mut state = array.lock();
        let slot = &mut state.slots[place];
        if !slot.uuid.is_nil() && slot.uuid != device.uuid() {
            let (found, expected) = (device.uuid(), slot.uuid);
            let reason = format!("{} has the UUID {found}, and the member has {expected}", device.name());
            return Err(BdevError::Invalid { field: "base_bdevs", reason });
        }
        let range = (slot.data_offset, slot.data_blocks);
        drop(state);
        let (first, blocks) = array.check_member(&device, range, block_bytes)?;
        let mut state = array.lock();
        let slot = &mut state.slots[place];
        (slot.data_offset, slot.data_blocks) = (first, blocks);
        (slot.name, slot.uuid) = (Some(device.name().to_string()), device.uuid());
        slot.is_configured = true;
        slot.base = Some(base.with_first_lba(first));
        Ok(())
    }

    /// Starts an array that has its members: writes the first superblock, or takes the one that was found.
    ///
    /// # Errors
    /// The members do not fit each other or the superblock, cannot be written, or the name is in use. The
    /// array stays as it is, without its members.
    pub(crate) fn start(&self, array: &Arc<RaidArray>) -> Result<(), RaidError> {
        let stale = self.stale_places(array);
        if stale.is_empty() {
            let known = array.lock().superblock.clone();
            return self.start_with(array, known.as_ref());
        }
        let present = array.lock().slots.iter().filter(|slot| slot.is_configured).count();
        if present - stale.len() < members_min(array.level, array.lock().slots.len()) {
            return Err(RaidError::OnlyStale { name: array.name.clone() });
        }
        self.start_without(array, &stale)
    }

    /// The places of members whose data is older than that of others, which is logged.
    fn stale_places(&self, array: &RaidArray) -> Vec<usize> {
        let state = array.lock();
        let Some(known) = state.superblock.as_ref().filter(|_| is_redundant(array.level)) else {
            return Vec::new();
        };
        let ages = ages_of(known, &state.candidates);
        let mut stale = Vec::new();
        for (place, reason) in ages.stale {
            let slot = &state.slots[place];
            if slot.is_configured {
                let (bdev, name) = (slot.name.as_deref().unwrap_or_default(), &array.name);
                log::warn!(
                    target: "bdev_raid",
                    "{bdev} has older data than the array {name}, as a copy that was put back: {reason}"
                );
                stale.push(place);
            }
        }
        stale
    }

    /// Starts a redundant array without the members that are missing, which is recorded first.
    ///
    /// # Errors
    /// It is none that waits for members, or has too few; as [`start`](Self::start).
    pub(crate) fn start_degraded(&self, array: &Arc<RaidArray>) -> Result<(), RaidError> {
        let refuse = |reason: &str| {
            let reason = format!("{} {reason}", array.name);
            Err(BdevError::Invalid { field: "name", reason }.into())
        };
        let state = array.lock();
        if !is_redundant(array.level) || state.phase == ArrayPhase::Online {
            drop(state);
            return refuse("is no redundant array that waits for members");
        }
        if state.slots.iter().all(|slot| !slot.is_configured) {
            drop(state);
            return refuse("has no member yet");
        }
        let present = state.slots.iter().filter(|slot| slot.is_configured).count();
        if present < members_min(array.level, state.slots.len()) {
            drop(state);
            return refuse("lacks two members, without which there is no array");
        }
        let mut missing: Vec<usize> = {
            let places = array.expected_places(&state);
            places.into_iter().filter(|place| !state.slots[*place].is_configured).collect()
        };
        let least = members_min(array.level, state.slots.len());
        drop(state);
        let stale = self.stale_places(array);
        if present - stale.len() >= least {
            missing.extend(stale);
        } else {
            log::warn!(
                target: "bdev_raid",
                "the array {} starts with older data, as there is no other", array.name,
            );
        }
        self.start_without(array, &missing)
    }

    /// Starts a redundant array without some members, which is recorded first. Those that are there with
    /// older data are copied to.
    fn start_without(&self, array: &Arc<RaidArray>, missing: &[usize]) -> Result<(), RaidError> {
        let mut state = array.lock();
        let known = state.superblock.clone();
        if let Some(known) = &known {
            let mut next = known.clone();
            next.sequence += 1;
            for member in &mut next.members {
                if missing.contains(&member.slot.into()) {
                    member.state = MemberState::Missing;
                }
            }
            state.superblock = Some(next);
        }
        let ArrayState { slots, candidates, .. } = &mut *state;
        let mut bases: Vec<BaseBdev> = Vec::new();
        for place in missing {
            let uuid = slots[*place].uuid;
            let is_it = |candidate: &&mut Candidate| candidate.device.uuid() == uuid;
            candidates.iter_mut().filter(is_it).for_each(|candidate| candidate.is_stale = true);
            bases.extend(slots[*place].base.take());
            slots[*place].clear();
        }
        drop(state);
        drop(bases);
        let started = self.start_with(array, known.as_ref());
        if started.is_err() {
            array.lock().superblock = known;
        }
        started
    }

    /// Starts an array, of which `found` is the superblock that its members have.
    fn start_with(&self, array: &Arc<RaidArray>, found: Option<&RaidSuperblock>) -> Result<(), RaidError> {
        let result = self.try_start(array, found);
        if result.is_err() {
            let mut state = array.lock();
            state.slots.iter_mut().for_each(|slot| slot.is_configured = false);
            let bases: Vec<BaseBdev> = state.slots.iter_mut().filter_map(|slot| slot.base.take()).collect();
            drop(state);
            drop(bases);
        }
        result
    }

    fn try_start(
        &self,
        array: &Arc<RaidArray>,
        on_members: Option<&RaidSuperblock>,
    ) -> Result<(), RaidError> {
        let handle = self.reactors.get(array.uuid.as_u128() as usize % self.reactors.len().max(1));
        let handle = handle.ok_or(RaidError::Unavailable)?.clone();
        let Some(block_bytes) = array.block_bytes() else { return Err(RaidError::Unavailable) };
        let shape = array.shape(block_bytes)?;
        let mut state = array.lock();
        let bases = BaseSet::new(state.slots.len());
        let mut present = 0;
        for (place, slot) in state.slots.iter_mut().enumerate() {
            if let Some(base) = slot.base.take() {
                present |= 1 << place;
                if bases.insert(place, base).is_err() {
                    unreachable!("the set is new");
                }
            }
        }
        let (known, candidates) = (state.superblock.clone(), std::mem::take(&mut state.candidates));
        drop(state);
        let devices: Vec<Arc<BlockDevice>> = bases.bases().iter().map(|base| base.device().clone()).collect();
        let limits = MemberLimits::of(&devices, shape.blocks);
        let mut used = candidates.clone();
        used.retain(|candidate| bases.place_of(&candidate.device).is_some());
        let pages = in_sync_pages(&used, on_members);
        let ages = on_members.map(|known| ages_of(known, &used)).unwrap_or_default();
        let found = candidates.iter().filter_map(|candidate| candidate.on_disk.page.as_ref());
        let generation = found.map(|page| page.generation).max().unwrap_or(1);
        let first = (array.has_superblock && known.is_none())
            .then(|| array.first_superblock(shape.blocks, block_bytes));
        let first_page = first.as_ref().and_then(Mirror::first_page);
        let pages = if first.is_some() { first_page.iter().cloned().collect() } else { pages };
        let is_changed = known.as_ref() != on_members;
        let due = known.as_ref().filter(|_| is_changed || ages.lacks_superblock);
        if let Some(superblock) = first.as_ref().or(due) {
            let writes = writes_at_start(superblock, first_page.as_ref());
            let members = bases.bases().into_iter().map(|base| (base, writes.clone())).collect();
            if let Err(error) = write_members_now(&handle, members) {
                bases.release();
                return Err(error);
            }
        }
        if first.is_some() {
            array.lock().superblock = first;
        }
        let parity = shape.parity;
        let kind = kind_of(shape, || {
            Mirror::new(MirrorSetup {
                array: array.clone(),
                bases: bases.clone(),
                parity,
                accel: self.registry.accel().clone(),
                handle,
                geometry: limits.geometry,
                ops: limits.ops.clone(),
                options: self.options(),
                present,
                pages,
                generation,
                newest: ages.newest,
                behind: ages.behind,
                is_new: known.is_none(),
                is_page_due: is_changed,
            })
        });
        let mirror = match &kind {
            crate::bdev_of_array::RaidKind::Mirrored(mirror) => Some(mirror.clone()),
            crate::bdev_of_array::RaidKind::Striped(_) => None,
        };
        let module = Arc::new(RaidBdev::new(array, &bases, kind, limits));
        // Before users can lose it again.
        let mut state = array.lock();
        (state.phase, state.mirror) = (ArrayPhase::Online, mirror.clone());
        drop(state);
        let device = match self.registry.register(&array.name, Some(array.uuid), &[], module) {
            Ok(device) => device,
            Err(error) => {
                let mut state = array.lock();
                (state.phase, state.mirror) = (ArrayPhase::Configuring, None);
                drop(state);
                bases.release();
                return Err(error.into());
            }
        };
        array.lock().device = Some(device.clone());
        stack_all(&self.registry, &device, &bases);
        log::info!(target: "bdev_raid", "the array {} has {} of its members", array.name, devices.len());
        if let Some(mirror) = mirror {
            mirror.start(&device, &self.registry);
        }
        for candidate in candidates {
            let is_present = bases.place_of(&candidate.device).is_some();
            if !is_present && !candidate.device.is_removed() {
                self.report_return(array, &candidate);
            }
        }
        Ok(())
    }

    /// Writes to members that are not used by an array.
    pub(crate) fn write_now(
        &self,
        members: Vec<(Arc<BaseBdev>, Vec<MetadataWrite>)>,
    ) -> Result<(), RaidError> {
        let handle = self.reactors.first().ok_or(RaidError::Unavailable)?;
        write_members_now(handle, members)
    }

    /// Starts an array if it has all members that are expected; what fails is logged.
    pub(crate) fn start_if_complete(&self, array: &Arc<RaidArray>) {
        if array.phase() == ArrayPhase::Online || !array.is_complete() {
            return;
        }
        if let Err(error) = self.start(array) {
            log::warn!(target: "bdev_raid", "the array {} cannot start: {error}", array.name);
        }
    }

    /// Gives a device that has appeared to the arrays that name it and have no superblock on it:
    /// `has_none` says that the device was read and has none.
    pub(crate) fn configure_named(&self, device: &Arc<BlockDevice>, has_none: bool) {
        for array in self.all() {
            // What has a superblock is found by it.
            let is_open = array.phase() != ArrayPhase::Online && array.lock().superblock.is_none();
            if !is_open || array.has_superblock != has_none {
                continue;
            }
            let places: Vec<usize> = {
                let state = array.lock();
                let waits = |place: &usize| state.slots[*place].waits_for(device);
                (0..state.slots.len()).filter(waits).collect()
            };
            if places.is_empty() {
                continue;
            }
            if array.phase() == ArrayPhase::Offline {
                // It lost the others with it.
                self.restart(&array);
                continue;
            }
            self.configure_places(&array, &places);
            self.start_if_complete(&array);
        }
    }

    /// Looks for all members of an array without a superblock that has lost one.
    pub(crate) fn restart(&self, array: &Arc<RaidArray>) {
        let is_whole = {
            let state = array.lock();
            let is_there = |name: &String| self.registry.find(name).is_some();
            let mut names = state.slots.iter().filter_map(|slot| slot.name.as_ref());
            !state.is_stopped && !array.has_superblock && names.all(is_there)
        };
        if !is_whole {
            return;
        }
        let all: Vec<usize> = (0..array.lock().slots.len()).collect();
        self.configure_places(array, &all);
        self.start_if_complete(array);
    }

    fn configure_places(&self, array: &Arc<RaidArray>, places: &[usize]) {
        for place in places {
            if array.lock().slots[*place].is_configured {
                continue;
            }
            match self.configure(array, *place) {
                Ok(()) => {}
                Err(error) if is_unavailable(&error) => {}
                Err(error) => {
                    log::warn!(target: "bdev_raid", "the array {} lacks a member: {error}", array.name);
                }
            }
        }
    }

    /// Takes a device with a superblock to its array, which it makes if it is the first.
    ///
    /// # Errors
    /// Why the superblock is not used.
    pub(crate) fn assemble(&self, device: &Arc<BlockDevice>, on_disk: MemberOnDisk) -> Result<(), RaidError> {
        if device.is_removed() {
            return Err(BdevError::Removed { name: device.name().to_string() }.into());
        }
        let superblock = &on_disk.superblock;
        check_superblock(superblock, device)?;
        let candidate = Candidate::new(device, on_disk.clone());
        let Some(array) = self.by_uuid(superblock.uuid) else {
            if superblock.member(device.uuid()).is_none() {
                return Err(not_listed(device, superblock));
            }
            let array = RaidArray::of_superblock(superblock, self.options().resyncs_all);
            self.insert(&array)?;
            array.lock().candidates.push(candidate);
            self.claim_candidates(&array);
            return Ok(());
        };
        let (phase, known) = {
            let state = array.lock();
            (state.phase, state.superblock.clone())
        };
        let Some(known) = known else {
            return Err(RaidError::OtherArray { name: array.name.clone(), uuid: array.uuid });
        };
        let is_newer = superblock.sequence > known.sequence;
        if phase == ArrayPhase::Online {
            if is_newer {
                return Err(RaidError::Newer { name: array.name.clone() });
            }
            return self.return_member(&array, &candidate);
        }
        let newest = if is_newer { superblock } else { &known };
        if newest.member(device.uuid()).is_none() {
            return Err(not_listed(device, newest));
        }
        let array =
            if is_newer || phase == ArrayPhase::Offline { self.renew(&array, newest)? } else { array };
        let mut state = array.lock();
        state.candidates.retain(|other| !Arc::ptr_eq(&other.device, device) && !other.device.is_removed());
        if let Some(twin) = state.candidates.iter().find(|other| other.device.uuid() == device.uuid()) {
            let (name, other) = (device.name().to_string(), twin.device.name().to_string());
            return Err(BdevError::SameIdentity { name, uuid: device.uuid(), other }.into());
        }
        state.candidates.push(candidate);
        drop(state);
        self.claim_candidates(&array);
        Ok(())
    }

    /// The array of a newer superblock in place of the one that was made of an older, with what was found of
    /// its members.
    fn renew(&self, array: &Arc<RaidArray>, newest: &RaidSuperblock) -> Result<Arc<RaidArray>, RaidError> {
        let mut candidates = std::mem::take(&mut array.lock().candidates);
        if array.phase() == ArrayPhase::Offline && array.level != RaidLevel::Raid1 {
            // The members that it did not lose are there, as they were.
            let has_data = |member: &&RaidMember| member.state == MemberState::Configured;
            let members = newest.members.iter().filter(has_data);
            let devices = members.filter_map(|member| self.registry.find(&member.uuid.to_string()));
            let on_disk = MemberOnDisk::without_page(newest.clone());
            candidates.extend(devices.map(|device| Candidate::new(&device, on_disk.clone())));
        }
        self.remove(array);
        let renewed = RaidArray::of_superblock(newest, self.options().resyncs_all);
        self.insert(&renewed)?;
        renewed.lock().candidates = candidates;
        Ok(renewed)
    }

    /// Claims what was found of an array, as far as its superblock says that it has the data, and starts it
    /// when that is all.
    fn claim_candidates(&self, array: &Arc<RaidArray>) {
        let candidates: Vec<Candidate> = array.lock().candidates.clone();
        for candidate in candidates {
            let uuid = candidate.device.uuid();
            let place = {
                let state = array.lock();
                let is_it = |slot: &ArraySlot| slot.uuid == uuid && !slot.is_configured;
                state.slots.iter().position(is_it)
            };
            if let Some(place) = place
                && let Err(error) = self.configure(array, place)
            {
                let (name, array) = (candidate.device.name(), &array.name);
                log::warn!(target: "bdev_raid", "{name} is no member of the array {array}: {error}");
            }
        }
        self.start_if_complete(array);
    }

    fn report_return(&self, array: &Arc<RaidArray>, candidate: &Candidate) {
        if let Err(error) = self.return_member(array, candidate) {
            let (name, array) = (candidate.device.name(), &array.name);
            log::warn!(target: "bdev_raid", "{name} does not return to the array {array}: {error}");
        }
    }

    /// Takes a member that an online mirror was without: it is copied to.
    pub(crate) fn return_member(
        &self,
        array: &Arc<RaidArray>,
        candidate: &Candidate,
    ) -> Result<(), RaidError> {
        let device = &candidate.device;
        let (known, mirror) = {
            let state = array.lock();
            (state.superblock.clone(), state.mirror.clone())
        };
        let (Some(known), Some(mirror)) = (known, mirror) else {
            return Err(RaidError::NoFreeSlot { name: array.name.clone() });
        };
        let Some(member) = known.member(device.uuid()) else { return Err(not_listed(device, &known)) };
        let place = usize::from(member.slot);
        if member.state == MemberState::Configured || mirror.has_member(place) {
            let (name, other) = (device.name().to_string(), array.name.clone());
            return Err(BdevError::SameIdentity { name, uuid: device.uuid(), other }.into());
        }
        let found = &candidate.on_disk;
        let in_sync = mirror.in_sync_uuids();
        let differs = found.superblock.sequence == known.sequence && found.superblock != known;
        // What is older than the data of members that list it has no other history.
        let is_other = differs || excludes_all(&found.superblock, &in_sync);
        if is_other && !candidate.is_stale {
            return Err(RaidError::Diverged { bdev: device.name().to_string(), name: array.name.clone() });
        }
        let blocks = if array.level == RaidLevel::Raid1 { known.blocks } else { member.data_blocks };
        let range = (member.data_offset, blocks);
        self.join(array, &mirror, device, place, range, Some(found).filter(|_| !candidate.is_stale))
    }

    /// Adds a member to a free place of an online mirror: it is copied to.
    pub(crate) fn add_member(
        &self,
        array: &Arc<RaidArray>,
        device: &Arc<BlockDevice>,
    ) -> Result<(), RaidError> {
        let no_slot = || RaidError::NoFreeSlot { name: array.name.clone() };
        let (mirror, place, blocks) = {
            let state = array.lock();
            let mirror = state.mirror.clone().ok_or_else(no_slot)?;
            let place = state.slots.iter().position(|slot| !slot.is_configured).ok_or_else(no_slot)?;
            let blocks = match array.level {
                RaidLevel::Raid1 => state.device.as_ref().map_or(0, |device| device.geometry().blocks),
                _ => state.slots[place].data_blocks,
            };
            (mirror, place, blocks)
        };
        if mirror.is_copying() {
            return Err(RaidError::Copying { name: array.name.clone() });
        }
        self.join(array, &mirror, device, place, (0, blocks), None)
    }

    fn join(
        &self,
        array: &Arc<RaidArray>,
        mirror: &Arc<Mirror>,
        device: &Arc<BlockDevice>,
        place: usize,
        range: (u64, u64),
        found: Option<&MemberOnDisk>,
    ) -> Result<(), RaidError> {
        let upper = array.lock().device.clone().ok_or(RaidError::Unavailable)?;
        let (first, data_blocks) = array.check_member(device, range, array.block_bytes())?;
        if let Some(op) = mirror.lacks_op(device) {
            let reason = format!("{} does not support {}, and the array does", device.name(), op.name());
            return Err(BdevError::Invalid { field: "base_bdev", reason }.into());
        }
        self.registry.check_levels(device, Some(&upper))?;
        let base = BaseBdev::claim(&self.registry, device.name(), &array.claimant())?.with_first_lba(first);
        mirror.join(base, NewMember { place, data_offset: first, data_blocks }, found)?;
        self.registry.stack(device, &upper);
        Ok(())
    }

    /// The array that has a device as its member, and the place.
    pub(crate) fn array_of(&self, device: &BlockDevice) -> Option<(Arc<RaidArray>, usize)> {
        self.all().into_iter().find_map(|array| {
            let state = array.lock();
            let is_it = |slot: &ArraySlot| {
                let base = slot.base.as_ref();
                base.is_some_and(|base| std::ptr::eq(Arc::as_ptr(base.device()), device))
            };
            let configuring = state.slots.iter().position(is_it);
            let online = state.device.as_ref().and_then(|upper| raid_of(upper)?.place_of(device));
            drop(state);
            configuring.or(online).map(|place| (array, place))
        })
    }

    /// Releases the member of an array that has not started.
    pub(crate) fn forget_member(&self, array: &RaidArray, place: usize) {
        let mut state = array.lock();
        let slot = &mut state.slots[place];
        slot.is_configured = false;
        let base = slot.base.take();
        if let Some(device) = base.as_ref().map(|base| base.device()) {
            state.candidates.retain(|candidate| !Arc::ptr_eq(&candidate.device, device));
        }
        drop(state);
        drop(base);
    }

    /// A device was removed: an array that has not started does without it until it returns.
    pub(crate) fn device_removed(&self, device: &Arc<BlockDevice>) {
        for array in self.all() {
            let place = {
                let mut state = array.lock();
                state.candidates.retain(|candidate| !Arc::ptr_eq(&candidate.device, device));
                let is_it = |slot: &ArraySlot| {
                    slot.base.as_ref().is_some_and(|base| Arc::ptr_eq(base.device(), device))
                };
                state.slots.iter().position(is_it)
            };
            if let Some(place) = place {
                self.forget_member(&array, place);
            }
        }
    }
}

/// The superblock of an array that starts, and the first page of a bitmap.
fn writes_at_start(superblock: &RaidSuperblock, first_page: Option<&IntentPage>) -> Vec<MetadataWrite> {
    let mut writes = vec![superblock_write(superblock)];
    if let Some(page) = first_page {
        writes.extend([wipe_pages(superblock.block_bytes), page_write(page, superblock.block_bytes)]);
    }
    writes
}

/// The ages of the members of an array that were found.
fn ages_of(known: &RaidSuperblock, candidates: &[Candidate]) -> MemberAges {
    let with_place = candidates.iter().filter_map(|candidate| {
        let member = known.member(candidate.device.uuid())?;
        Some((usize::from(member.slot), &candidate.on_disk))
    });
    MemberAges::of(known, &with_place.collect::<Vec<(usize, &MemberOnDisk)>>())
}

/// The pages of the members that have the data, which are to be believed: of the array, with the sequence
/// number of its newest superblock.
fn in_sync_pages(candidates: &[Candidate], known: Option<&RaidSuperblock>) -> Vec<IntentPage> {
    let Some(known) = known else { return Vec::new() };
    let has_data = |candidate: &&Candidate| {
        let member = known.member(candidate.device.uuid());
        member.is_some_and(|member| member.state == MemberState::Configured)
    };
    let pages = candidates.iter().filter(has_data).filter_map(|candidate| candidate.on_disk.page.clone());
    pages.filter(|page| page.array == known.uuid && page.sequence == known.sequence).collect()
}

fn not_listed(device: &BlockDevice, superblock: &RaidSuperblock) -> RaidError {
    let (bdev, uuid) = (device.name().to_string(), device.uuid());
    RaidError::NotListed { bdev, uuid, name: superblock.name.clone() }
}

/// Checks what is decoded, but may not fit the device or what is supported.
fn check_superblock(superblock: &RaidSuperblock, device: &BlockDevice) -> Result<(), RaidError> {
    let block_size = device.geometry().block_size;
    let invalid = |reason: String| Err(BdevError::Invalid { field: "superblock", reason }.into());
    if superblock.block_bytes != block_size {
        let expected = superblock.block_bytes;
        return invalid(format!("the array has blocks of {expected} bytes, and the device of {block_size}"));
    }
    if superblock.name.contains(char::is_control) {
        return invalid(format!("the name {:?} is not printable", superblock.name));
    }
    if superblock.sequence > u64::MAX / 2 {
        return invalid(format!("no counting reaches the sequence number {}", superblock.sequence));
    }
    let strip_bytes = u64::from(superblock.strip_blocks) * u64::from(block_size);
    let strip_kb = u32::try_from(strip_bytes / 1024).unwrap_or(u32::MAX);
    if u64::from(strip_kb) * 1024 != strip_bytes {
        return invalid(format!("strips of {strip_bytes} bytes are no whole KiB"));
    }
    check_level(superblock.level, strip_kb, superblock.slots.into())?;
    let has_data = |member: &&RaidMember| member.state == MemberState::Configured;
    let members = superblock.members.iter().filter(has_data).count();
    if members < members_min(superblock.level, superblock.slots.into()) {
        let slots = superblock.slots;
        return invalid(format!("{members} of {slots} members have data, without which there is no array"));
    }
    let offset_min = u64::from(superblock.encode().len() as u32).div_ceil(block_size.into());
    let overlaps =
        |member: &RaidMember| member.state == MemberState::Configured && member.data_offset < offset_min;
    if superblock.members.iter().any(overlaps) {
        return invalid("the data of a member begins in the superblock".to_string());
    }
    Ok(())
}

/// Whether the data of members leaves room for the bitmap.
pub(crate) fn has_room_for_bitmap(superblock: &RaidSuperblock) -> bool {
    let least = wire_raid::DATA_OFFSET_BYTES_MIN / u64::from(superblock.block_bytes);
    let has_data = |member: &&RaidMember| member.state == MemberState::Configured;
    has_bitmap(superblock.block_bytes)
        && superblock.members.iter().filter(has_data).all(|member| member.data_offset >= least)
}
