//! The superblock of an array.

use codec::{DecodeError, crc32c};
use uuid::Uuid;

use crate::{array, put, u16_at, u32_at, u64_at, uuid_at};

/// Bytes before the list of members.
pub const SUPERBLOCK_HEADER_BYTES: usize = 256;
/// Most members of the list, whose length is one byte.
pub const MEMBERS_MAX: usize = 255;
/// Bytes of the longest superblock.
pub const SUPERBLOCK_BYTES_MAX: usize = SUPERBLOCK_HEADER_BYTES + MEMBERS_MAX * MEMBER_BYTES;
/// Bytes of the longest name, which ends with a zero byte.
pub const NAME_BYTES_MAX: usize = NAME_FIELD_BYTES - 1;

const SIGNATURE: [u8; 8] = *b"SPDKRAID";
const VERSION_MAJOR: u16 = 1;
const VERSION_MINOR: u16 = 0;

const MAJOR_AT: usize = 8;
const MINOR_AT: usize = 10;
const LENGTH_AT: usize = 12;
const CRC_AT: usize = 16;
const UUID_AT: usize = 24;
const NAME_AT: usize = 40;
const NAME_FIELD_BYTES: usize = 64;
const BLOCKS_AT: usize = 104;
const BLOCK_BYTES_AT: usize = 112;
const LEVEL_AT: usize = 116;
const STRIP_BLOCKS_AT: usize = 120;
const SEQUENCE_AT: usize = 128;
const SLOTS_AT: usize = 136;
const MEMBER_COUNT_AT: usize = 255;
const _: () = assert!(MEMBER_COUNT_AT + 1 == SUPERBLOCK_HEADER_BYTES);

const MEMBER_BYTES: usize = 64;
const MEMBER_DATA_OFFSET_AT: usize = 16;
const MEMBER_DATA_BLOCKS_AT: usize = 24;
const MEMBER_STATE_AT: usize = 32;
const MEMBER_SLOT_AT: usize = 40;

/// How an array distributes its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RaidLevel {
    /// In strips, over all members in turn.
    Raid0,
    /// All of it on every member.
    Raid1,
    /// Full stripes with parity.
    Raid5f,
    /// One member after the other.
    Concat,
}

impl RaidLevel {
    const CODES: [(RaidLevel, u32); 4] =
        [(RaidLevel::Raid0, 0), (RaidLevel::Raid1, 1), (RaidLevel::Raid5f, 0x5f), (RaidLevel::Concat, 99)];

    fn of(code: u32) -> Option<RaidLevel> {
        RaidLevel::CODES.iter().find(|(_, other)| *other == code).map(|(level, _)| *level)
    }

    fn code(self) -> u32 {
        match self {
            RaidLevel::Raid0 => 0,
            RaidLevel::Raid1 => 1,
            RaidLevel::Raid5f => 0x5f,
            RaidLevel::Concat => 99,
        }
    }
}

/// What is known of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberState {
    /// It was removed, or is being rebuilt.
    Missing,
    /// It has all data of its part.
    Configured,
    /// It has failed.
    Failed,
    /// It replaces a member that fails; SPDK writes it nowhere yet.
    Spare,
}

impl MemberState {
    const ALL: [MemberState; 4] =
        [MemberState::Missing, MemberState::Configured, MemberState::Failed, MemberState::Spare];

    fn code(self) -> u32 {
        match self {
            MemberState::Missing => 0,
            MemberState::Configured => 1,
            MemberState::Failed => 2,
            MemberState::Spare => 3,
        }
    }
}

/// A member of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RaidMember {
    /// UUID of the device.
    pub uuid: Uuid,
    /// Block of the device at which its data begins.
    pub data_offset: u64,
    /// Blocks of data.
    pub data_blocks: u64,
    /// Its state.
    pub state: MemberState,
    /// Its place in the array, from 0.
    pub slot: u8,
}

/// The superblock of an array: each member has a copy, and the newest counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RaidSuperblock {
    /// UUID of the array; not nil.
    pub uuid: Uuid,
    /// Its name, of [`NAME_BYTES_MAX`] bytes at most and without a zero byte.
    pub name: String,
    /// Its blocks.
    pub blocks: u64,
    /// Bytes of a block, of the array and of its members.
    pub block_bytes: u32,
    /// How it distributes its data.
    pub level: RaidLevel,
    /// Blocks of a strip; 0 without strips.
    pub strip_blocks: u32,
    /// Grows with each superblock that is written, also by SPDK when it uses the array.
    pub sequence: u64,
    /// Number of its members' places; not 0.
    pub slots: u8,
    /// The members, [`MEMBERS_MAX`] at most; one a slot.
    pub members: Vec<RaidMember>,
}

impl RaidSuperblock {
    /// The length of the superblock that begins so, if it is one, so that what is missing can be read.
    ///
    /// # Errors
    /// The first field of the head that no superblock has.
    pub fn length(head: &[u8]) -> Result<usize, DecodeError> {
        if head.len() < SUPERBLOCK_HEADER_BYTES {
            let (got, need) = (head.len(), SUPERBLOCK_HEADER_BYTES);
            return Err(DecodeError::Length { what: "the superblock", got, need });
        }
        if head[..SIGNATURE.len()] != SIGNATURE {
            return wrong("the signature of the superblock", 0, u64::from_be_bytes(array(head, 0)));
        }
        let major = u16_at(head, MAJOR_AT);
        if major != VERSION_MAJOR {
            return wrong("the major version of the superblock", MAJOR_AT, major.into());
        }
        let length = u32_at(head, LENGTH_AT);
        if !(SUPERBLOCK_HEADER_BYTES..=SUPERBLOCK_BYTES_MAX).contains(&(length as usize)) {
            return wrong("the length of the superblock", LENGTH_AT, length.into());
        }
        Ok(length as usize)
    }

    /// Decodes the superblock at the start of a member. A higher minor version is the same superblock with
    /// more fields, which are ignored.
    ///
    /// # Errors
    /// The first field that no superblock has, or that bytes are missing.
    pub fn decode(from: &[u8]) -> Result<RaidSuperblock, DecodeError> {
        let length = RaidSuperblock::length(from)?;
        let Some(bytes) = from.get(..length) else {
            return Err(DecodeError::Length { what: "the superblock", got: from.len(), need: length });
        };
        let crc = u32_at(bytes, CRC_AT);
        if crc != superblock_crc(bytes) {
            return wrong("the CRC of the superblock", CRC_AT, crc.into());
        }
        let uuid = uuid_at(bytes, UUID_AT);
        if uuid.is_nil() {
            return wrong("the UUID of the array", UUID_AT, 0);
        }
        let name = decode_name(&bytes[NAME_AT..NAME_AT + NAME_FIELD_BYTES])?;
        let level = u32_at(bytes, LEVEL_AT);
        let Some(level) = RaidLevel::of(level) else {
            return wrong("the level of the array", LEVEL_AT, level.into());
        };
        let (slots, count) = (bytes[SLOTS_AT], bytes[MEMBER_COUNT_AT]);
        if slots == 0 {
            return wrong("the number of members", SLOTS_AT, 0);
        }
        let list = &bytes[SUPERBLOCK_HEADER_BYTES..];
        if list.len() < usize::from(count) * MEMBER_BYTES {
            return wrong("the length of the list of members", MEMBER_COUNT_AT, count.into());
        }
        let mut members: Vec<RaidMember> = Vec::with_capacity(count.into());
        for (index, entry) in list.chunks_exact(MEMBER_BYTES).take(count.into()).enumerate() {
            let at = SUPERBLOCK_HEADER_BYTES + index * MEMBER_BYTES;
            let member = decode_member(entry, at, slots)?;
            if members.iter().any(|other| other.slot == member.slot) {
                return wrong(
                    "the slot of a member, which another has",
                    at + MEMBER_SLOT_AT,
                    member.slot.into(),
                );
            }
            let is_twice = |other: &RaidMember| other.uuid == member.uuid && !member.uuid.is_nil();
            if members.iter().any(is_twice) {
                return wrong("the UUID of a member, which another has", at, u64_at(entry, 0));
            }
            members.push(member);
        }
        Ok(RaidSuperblock {
            uuid,
            name,
            blocks: u64_at(bytes, BLOCKS_AT),
            block_bytes: u32_at(bytes, BLOCK_BYTES_AT),
            level,
            strip_blocks: u32_at(bytes, STRIP_BLOCKS_AT),
            sequence: u64_at(bytes, SEQUENCE_AT),
            slots,
            members,
        })
    }

    /// Encodes the superblock, with its CRC. What is behind it in its last block is zero.
    ///
    /// # Panics
    /// If the name is too long, or there are too many members.
    pub fn encode(&self) -> Vec<u8> {
        let (name, count) = (self.name.as_bytes(), self.members.len());
        assert!(name.len() <= NAME_BYTES_MAX && count <= MEMBERS_MAX, "{name:?} with {count} members");
        let mut out = vec![0; SUPERBLOCK_HEADER_BYTES + count * MEMBER_BYTES];
        let length = out.len() as u32;
        put(&mut out, 0, &SIGNATURE);
        put(&mut out, MAJOR_AT, &VERSION_MAJOR.to_le_bytes());
        put(&mut out, MINOR_AT, &VERSION_MINOR.to_le_bytes());
        put(&mut out, LENGTH_AT, &length.to_le_bytes());
        put(&mut out, UUID_AT, self.uuid.as_bytes());
        put(&mut out, NAME_AT, name);
        put(&mut out, BLOCKS_AT, &self.blocks.to_le_bytes());
        put(&mut out, BLOCK_BYTES_AT, &self.block_bytes.to_le_bytes());
        put(&mut out, LEVEL_AT, &self.level.code().to_le_bytes());
        put(&mut out, STRIP_BLOCKS_AT, &self.strip_blocks.to_le_bytes());
        put(&mut out, SEQUENCE_AT, &self.sequence.to_le_bytes());
        (out[SLOTS_AT], out[MEMBER_COUNT_AT]) = (self.slots, count as u8);
        for (member, entry) in
            self.members.iter().zip(out[SUPERBLOCK_HEADER_BYTES..].chunks_mut(MEMBER_BYTES))
        {
            put(entry, 0, member.uuid.as_bytes());
            put(entry, MEMBER_DATA_OFFSET_AT, &member.data_offset.to_le_bytes());
            put(entry, MEMBER_DATA_BLOCKS_AT, &member.data_blocks.to_le_bytes());
            put(entry, MEMBER_STATE_AT, &member.state.code().to_le_bytes());
            entry[MEMBER_SLOT_AT] = member.slot;
        }
        let crc = superblock_crc(&out);
        put(&mut out, CRC_AT, &crc.to_le_bytes());
        out
    }

    /// The member whose device has a UUID.
    pub fn member(&self, uuid: Uuid) -> Option<&RaidMember> {
        self.members.iter().find(|member| member.uuid == uuid)
    }
}

fn wrong<T>(what: &'static str, at: usize, value: u64) -> Result<T, DecodeError> {
    Err(DecodeError::value(what, at as u32, value))
}

fn decode_name(field: &[u8]) -> Result<String, DecodeError> {
    let invalid = |reason| Err(DecodeError::Text { what: "the name of the array", reason });
    let Some(end) = field.iter().position(|byte| *byte == 0) else {
        return invalid("it has no end");
    };
    match std::str::from_utf8(&field[..end]) {
        Ok("") => invalid("it is empty"),
        Ok(name) => Ok(name.to_string()),
        Err(_) => invalid("it is not UTF-8"),
    }
}

fn decode_member(entry: &[u8], at: usize, slots: u8) -> Result<RaidMember, DecodeError> {
    let slot = entry[MEMBER_SLOT_AT];
    if slot >= slots {
        return wrong("the slot of a member", at + MEMBER_SLOT_AT, slot.into());
    }
    let code = u32_at(entry, MEMBER_STATE_AT);
    let Some(state) = MemberState::ALL.into_iter().find(|state| state.code() == code) else {
        return wrong("the state of a member", at + MEMBER_STATE_AT, code.into());
    };
    let (data_offset, data_blocks) =
        (u64_at(entry, MEMBER_DATA_OFFSET_AT), u64_at(entry, MEMBER_DATA_BLOCKS_AT));
    if data_offset.checked_add(data_blocks).is_none() {
        return wrong("the size of a member's data", at + MEMBER_DATA_BLOCKS_AT, data_blocks);
    }
    let uuid = uuid_at(entry, 0);
    if uuid.is_nil() && state == MemberState::Configured {
        return wrong("the UUID of a member", at, 0);
    }
    Ok(RaidMember { uuid, data_offset, data_blocks, state, slot })
}

/// The CRC32C of a superblock, whose field counts as zero, from an initial value of 0 and without the final
/// inversion: the usual CRC32C XORed with that of as many zeroes, as CRCs are linear.
fn superblock_crc(bytes: &[u8]) -> u32 {
    let mut copy = bytes.to_vec();
    put(&mut copy, CRC_AT, &[0; 4]);
    let crc = crc32c(&copy);
    copy.fill(0);
    crc ^ crc32c(&copy)
}
