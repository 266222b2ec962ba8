//! An array as the control plane knows it: what it is to be, its members, and its superblock.

use std::sync::{Arc, Mutex, MutexGuard};

use bdev::stacking::BaseBdev;
use bdev::{BdevError, BlockDevice, InfoValue};
use uuid::Uuid;
use wire_raid::{DATA_OFFSET_BYTES_MIN, MemberState, RaidLevel, RaidMember, RaidSuperblock};

use crate::layout::StripeLayout;
use crate::level::{is_redundant, level_name};
use crate::member_age::MemberOnDisk;
use crate::mirror::Mirror;
use crate::parity_layout::ParityLayout;

/// An array, which lives from the call or the superblock that made it to its deletion.
pub(crate) struct RaidArray {
    pub(crate) name: String,
    pub(crate) uuid: Uuid,
    pub(crate) level: RaidLevel,
    /// 0 without strips.
    pub(crate) strip_size_kb: u32,
    /// Its members have superblocks, or get them when it starts.
    pub(crate) has_superblock: bool,
    /// Its members are copied to each other when it starts, whatever their bitmaps say.
    pub(crate) resyncs_all: bool,
    state: Mutex<ArrayState>,
}

/// SPDK's states of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArrayPhase {
    /// Members are missing.
    Configuring,
    /// It is a bdev.
    Online,
    /// It was a bdev, and lost a member without which there is none.
    Offline,
}

impl ArrayPhase {
    pub(crate) fn name(self) -> &'static str {
        match self {
            ArrayPhase::Configuring => "configuring",
            ArrayPhase::Online => "online",
            ArrayPhase::Offline => "offline",
        }
    }
}

/// What changes of an array.
pub(crate) struct ArrayState {
    pub(crate) phase: ArrayPhase,
    pub(crate) slots: Vec<ArraySlot>,
    /// The newest that is known: read from members, or written last. `None` without superblocks, and before
    /// the first is written.
    pub(crate) superblock: Option<RaidSuperblock>,
    /// Members with a superblock of the array that were found before it started.
    pub(crate) candidates: Vec<Candidate>,
    /// A member was removed on request, and the array went: it does not start by itself again.
    pub(crate) is_stopped: bool,
    /// While it is online.
    pub(crate) device: Option<Arc<BlockDevice>>,
    /// While it is online, and redundant.
    pub(crate) mirror: Option<Arc<Mirror>>,
}

/// A member that was found by its superblock.
#[derive(Clone)]
pub(crate) struct Candidate {
    pub(crate) device: Arc<BlockDevice>,
    pub(crate) on_disk: MemberOnDisk,
    /// Its data is older than that of the others: all is copied to it.
    pub(crate) is_stale: bool,
}

impl Candidate {
    pub(crate) fn new(device: &Arc<BlockDevice>, on_disk: MemberOnDisk) -> Candidate {
        Candidate { device: device.clone(), on_disk, is_stale: false }
    }
}

/// A member's place.
#[derive(Default)]
pub(crate) struct ArraySlot {
    /// Name, alias or UUID as it was given; later the name of the device.
    pub(crate) name: Option<String>,
    /// Nil until the device is known.
    pub(crate) uuid: Uuid,
    /// Before the array starts: the member, claimed.
    pub(crate) base: Option<BaseBdev>,
    /// It has its member.
    pub(crate) is_configured: bool,
    /// Block of the member at which its data begins.
    pub(crate) data_offset: u64,
    /// Blocks of its data; 0 until they are known.
    pub(crate) data_blocks: u64,
}

impl ArraySlot {
    /// As SPDK shows a place whose member was removed.
    pub(crate) fn clear(&mut self) {
        *self = ArraySlot { data_blocks: self.data_blocks, ..ArraySlot::default() };
    }

    /// Whether it waits for this device.
    pub(crate) fn waits_for(&self, device: &BlockDevice) -> bool {
        if self.is_configured {
            return false;
        }
        let is_named = self.name.as_ref().is_some_and(|name| {
            name == device.name()
                || device.aliases().contains(name)
                || device.uuid().to_string().eq_ignore_ascii_case(name)
        });
        is_named || (!self.uuid.is_nil() && self.uuid == device.uuid())
    }
}

/// The blocks of an array that starts, and where they are.
pub(crate) struct ArrayShape {
    pub(crate) blocks: u64,
    /// `None` if it is redundant.
    pub(crate) layout: Option<StripeLayout>,
    /// Of raid5f.
    pub(crate) parity: Option<ParityLayout>,
}

/// Largest stripe of raid5f: a write has all of it in memory.
const STRIPE_BYTES_MAX: u64 = 256 << 20;

impl RaidArray {
    pub(crate) fn new(
        name: &str,
        uuid: Uuid,
        (level, strip_size_kb): (RaidLevel, u32),
        has_superblock: bool,
        resyncs_all: bool,
        slots: Vec<ArraySlot>,
    ) -> Arc<RaidArray> {
        let state = ArrayState {
            phase: ArrayPhase::Configuring,
            slots,
            superblock: None,
            candidates: Vec::new(),
            is_stopped: false,
            device: None,
            mirror: None,
        };
        Arc::new(RaidArray {
            name: name.to_string(),
            uuid,
            level,
            strip_size_kb,
            has_superblock,
            resyncs_all,
            state: Mutex::new(state),
        })
    }

    /// An array of a superblock, whose members are to be found.
    pub(crate) fn of_superblock(superblock: &RaidSuperblock, resyncs_all: bool) -> Arc<RaidArray> {
        let mut slots: Vec<ArraySlot> = (0..superblock.slots).map(|_| ArraySlot::default()).collect();
        for member in &superblock.members {
            let slot = &mut slots[usize::from(member.slot)];
            if member.state == MemberState::Configured {
                (slot.uuid, slot.data_offset) = (member.uuid, member.data_offset);
            }
            slot.data_blocks = member.data_blocks;
        }
        // A strip of 2^32 - 1 blocks of 2^32 - 1 bytes fits 64 bits.
        let strip_bytes = u64::from(superblock.strip_blocks) * u64::from(superblock.block_bytes);
        let strip_size_kb = u32::try_from(strip_bytes / 1024).unwrap_or(u32::MAX);
        let kind = (superblock.level, strip_size_kb);
        let (name, uuid) = (&superblock.name, superblock.uuid);
        let array = RaidArray::new(name, uuid, kind, true, resyncs_all, slots);
        array.lock().superblock = Some(superblock.clone());
        array
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, ArrayState> {
        // Each change is whole before anything can panic.
        sync::lock(&self.state)
    }

    pub(crate) fn phase(&self) -> ArrayPhase {
        self.lock().phase
    }

    /// Who claims its members.
    pub(crate) fn claimant(&self) -> String {
        format!("raid bdev {}", self.name)
    }

    /// Whether the array starts only with the member of a place: one that the superblock says has data, or,
    /// without a superblock, one that is named.
    fn is_expected(&self, state: &ArrayState, place: usize) -> bool {
        match &state.superblock {
            Some(superblock) => {
                let of_place = |member: &&RaidMember| usize::from(member.slot) == place;
                let member = superblock.members.iter().find(of_place);
                member.is_some_and(|member| member.state == MemberState::Configured)
            }
            None => !is_redundant(self.level) || state.slots[place].name.is_some(),
        }
    }

    /// Places of the members that the array is known to have.
    pub(crate) fn expected_places(&self, state: &ArrayState) -> Vec<usize> {
        (0..state.slots.len()).filter(|place| self.is_expected(state, *place)).collect()
    }

    /// Whether the array can start.
    pub(crate) fn is_complete(&self) -> bool {
        let state = self.lock();
        let places = self.expected_places(&state);
        !places.is_empty() && places.iter().all(|place| state.slots[*place].is_configured)
    }

    /// Checks a claimed member for a place, and says where its data is: first block and number of blocks.
    ///
    /// # Errors
    /// [`BdevError::Invalid`] with SPDK's rule that it does not keep.
    pub(crate) fn check_member(
        &self,
        device: &BlockDevice,
        (data_offset, data_blocks): (u64, u64),
        block_bytes: Option<u32>,
    ) -> Result<(u64, u64), BdevError> {
        let geometry = device.geometry();
        let name = device.name();
        let invalid = |reason: String| Err(BdevError::Invalid { field: "base_bdevs", reason });
        if geometry.metadata.bytes > 0 {
            return invalid(format!("{name} has metadata, with which there are no arrays"));
        }
        if let Some(expected) = block_bytes
            && expected != geometry.block_size
        {
            let found = geometry.block_size;
            return invalid(format!("{name} has blocks of {found} bytes, and the array of {expected}"));
        }
        let mut first = data_offset;
        if self.has_superblock && first == 0 {
            first = DATA_OFFSET_BYTES_MIN.div_ceil(geometry.block_size.into());
            let boundary = u64::from(geometry.optimal_io_boundary_blocks);
            first = if boundary == 0 { first } else { first.next_multiple_of(boundary) };
        }
        if first >= geometry.blocks {
            let blocks = geometry.blocks;
            return invalid(format!("{name} has {blocks} blocks, and data would begin at block {first}"));
        }
        let room = geometry.blocks - first;
        if data_blocks > room {
            let message = format!("{name} has {room} blocks from block {first} on, and needs {data_blocks}");
            return invalid(message);
        }
        Ok((first, if data_blocks == 0 { room } else { data_blocks }))
    }

    /// The block size of the members that the array has.
    pub(crate) fn block_bytes(&self) -> Option<u32> {
        let state = self.lock();
        if let Some(superblock) = &state.superblock {
            return Some(superblock.block_bytes);
        }
        if let Some(device) = &state.device {
            return Some(device.geometry().block_size);
        }
        let mut bases = state.slots.iter().filter_map(|slot| slot.base.as_ref());
        bases.next().map(|base| base.device().geometry().block_size)
    }

    /// The size of the array, and of each member's data, which it sets.
    ///
    /// # Errors
    /// [`BdevError::Invalid`]: a strip is smaller than a block, nothing is left, or the superblock says
    /// something else.
    pub(crate) fn shape(&self, block_bytes: u32) -> Result<ArrayShape, BdevError> {
        let invalid = |field, reason: String| Err(BdevError::Invalid { field, reason });
        let mut state = self.lock();
        let places = self.expected_places(&state);
        let strip_blocks = (u64::from(self.strip_size_kb) * 1024 / u64::from(block_bytes)) as u32;
        if self.level != RaidLevel::Raid1 && !strip_blocks.is_power_of_two() {
            let reason =
                format!("{} KiB is no power of two of blocks of {block_bytes} bytes", self.strip_size_kb);
            return invalid("strip_size_kb", reason);
        }
        let in_strips = |blocks: u64| blocks - blocks % u64::from(strip_blocks.max(1));
        let least = places.iter().map(|place| state.slots[*place].data_blocks).min().unwrap_or(0);
        let data_blocks = match self.level {
            RaidLevel::Raid0 | RaidLevel::Raid5f => Some(in_strips(least)),
            RaidLevel::Concat => None,
            RaidLevel::Raid1 => Some(least),
        };
        for slot in &mut state.slots {
            slot.data_blocks = data_blocks.unwrap_or_else(|| in_strips(slot.data_blocks));
        }
        let all = || state.slots.iter().map(|slot| slot.data_blocks);
        let shape = match self.level {
            RaidLevel::Raid1 => ArrayShape { blocks: least, layout: None, parity: None },
            RaidLevel::Raid5f => {
                let layout = ParityLayout::new(state.slots.len(), strip_blocks);
                let stripe_bytes = layout.stripe_blocks().saturating_mul(block_bytes.into());
                if stripe_bytes > STRIPE_BYTES_MAX {
                    let reason = format!("a stripe has {stripe_bytes} bytes, more than {STRIPE_BYTES_MAX}");
                    return invalid("strip_size_kb", reason);
                }
                let blocks = in_strips(least) / layout.strip_blocks() * layout.stripe_blocks();
                ArrayShape { blocks, layout: None, parity: Some(layout) }
            }
            RaidLevel::Raid0 => {
                let layout = StripeLayout::raid0(state.slots.len(), strip_blocks);
                ArrayShape { blocks: all().sum(), layout: Some(layout), parity: None }
            }
            RaidLevel::Concat => {
                let layout = StripeLayout::concat(all());
                ArrayShape { blocks: all().sum(), layout: Some(layout), parity: None }
            }
        };
        if all().any(|blocks| blocks == 0) {
            return invalid("base_bdevs", "a member has no room for a strip".to_string());
        }
        if let Some(superblock) = &state.superblock
            && superblock.blocks != shape.blocks
        {
            let (expected, found) = (superblock.blocks, shape.blocks);
            let reason = format!("the superblock says {expected} blocks, and the members have {found}");
            return invalid("superblock", reason);
        }
        Ok(shape)
    }

    /// The first superblock of the array, when it has all members.
    pub(crate) fn first_superblock(&self, blocks: u64, block_bytes: u32) -> RaidSuperblock {
        let state = self.lock();
        let member = |(place, slot): (usize, &ArraySlot)| RaidMember {
            uuid: slot.uuid,
            data_offset: slot.data_offset,
            data_blocks: slot.data_blocks,
            state: MemberState::Configured,
            slot: place as u8,
        };
        RaidSuperblock {
            uuid: self.uuid,
            name: self.name.clone(),
            blocks,
            block_bytes,
            level: self.level,
            strip_blocks: (u64::from(self.strip_size_kb) * 1024 / u64::from(block_bytes)) as u32,
            sequence: 1,
            slots: state.slots.len() as u8,
            members: state.slots.iter().enumerate().map(member).collect(),
        }
    }

    /// The members of `driver_specific.raid`, as SPDK's.
    pub(crate) fn describe(&self) -> Vec<(&'static str, InfoValue)> {
        let text = |text: String| InfoValue::Text(text);
        let state = self.lock();
        let number = |count: usize| InfoValue::Number(count as u64);
        let discovered = state.slots.iter().filter(|slot| slot.is_configured).count();
        let operational = match state.phase {
            ArrayPhase::Configuring => self.expected_places(&state).len(),
            ArrayPhase::Online | ArrayPhase::Offline => discovered,
        };
        let mut object = vec![
            ("uuid", text(self.uuid.to_string())),
            ("strip_size_kb", InfoValue::Number(self.strip_size_kb.into())),
            ("state", state.phase.name().into()),
            ("raid_level", level_name(self.level).into()),
            ("superblock", InfoValue::Bool(self.has_superblock)),
            ("num_base_bdevs", number(state.slots.len())),
            ("num_base_bdevs_discovered", number(discovered)),
            ("num_base_bdevs_operational", number(operational)),
        ];
        if let Some(mirror) = &state.mirror {
            object.extend(mirror.describe(&state));
        }
        let slot = |slot: &ArraySlot| {
            let name = slot.name.clone().map_or(InfoValue::Null, InfoValue::Text);
            InfoValue::Object(vec![
                ("name", name),
                ("uuid", text(slot.uuid.to_string())),
                ("is_configured", InfoValue::Bool(slot.is_configured)),
                ("data_offset", InfoValue::Number(slot.data_offset)),
                ("data_size", InfoValue::Number(slot.data_blocks)),
            ])
        };
        object.push(("base_bdevs_list", InfoValue::List(state.slots.iter().map(slot).collect())));
        object
    }
}
