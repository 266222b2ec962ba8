//! Submission queue entries, 64 bytes.

use crate::DecodeError;
use crate::le::{put16, put32, put64, u16_at, u32_at, u64_at};

/// Size in bytes of a submission queue entry (Base 2.0, section 3.3.3.1).
pub const SIZE: usize = 64;

const _: () = assert!(SIZE == 64 && at::CDW15 + 4 == SIZE);

mod at {
    pub(super) const CDW0: usize = 0;
    pub(super) const FLAGS: usize = 1;
    pub(super) const CID: usize = 2;
    pub(super) const NSID: usize = 4;
    pub(super) const CDW2: usize = 8;
    pub(super) const CDW3: usize = 12;
    pub(super) const MPTR: usize = 16;
    pub(super) const DPTR: usize = 24;
    pub(super) const CDW10: usize = 40;
    pub(super) const CDW11: usize = 44;
    pub(super) const CDW12: usize = 48;
    pub(super) const CDW13: usize = 52;
    pub(super) const CDW14: usize = 56;
    pub(super) const CDW15: usize = 60;
}

/// A submission queue entry. Any 64 bytes decode; the accessors and the typed commands in
/// [`io`](crate::io), [`admin`](crate::admin) and [`fabrics`](crate::fabrics) interpret them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sqe {
    /// Opcode, raw; its meaning depends on the queue and the command set.
    pub opcode: u8,
    /// FUSE in bits 0–1 and PSDT in bits 6–7; see [`fuse`](Self::fuse) and [`psdt`](Self::psdt).
    pub flags: u8,
    /// Command Identifier, unique among the outstanding commands of the queue.
    pub cid: u16,
    /// Namespace Identifier; 0 if unused. The low byte of a fabrics command is its type (FCTYPE).
    pub nsid: u32,
    /// Command Dword 2.
    pub cdw2: u32,
    /// Command Dword 3.
    pub cdw3: u32,
    /// Metadata Pointer.
    pub mptr: u64,
    /// Data Pointer: an SGL descriptor or two PRP entries.
    pub data: DataPointer,
    /// Command Dword 10.
    pub cdw10: u32,
    /// Command Dword 11.
    pub cdw11: u32,
    /// Command Dword 12.
    pub cdw12: u32,
    /// Command Dword 13.
    pub cdw13: u32,
    /// Command Dword 14.
    pub cdw14: u32,
    /// Command Dword 15.
    pub cdw15: u32,
}

/// Fused Operation (FUSE) (Base 2.0, section 3.3.3.1, CDW0 bits 9:8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fuse {
    /// Not fused.
    Normal,
    /// First command of a fused operation.
    First,
    /// Second command of a fused operation.
    Second,
    /// The reserved value 11b.
    Reserved,
}

/// PRP or SGL for Data Transfer (PSDT) (Base 2.0, section 3.3.3.1, CDW0 bits 15:14).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Psdt {
    /// PRP entries; not allowed for message-based transports.
    Prp,
    /// An SGL; metadata, if any, is one contiguous buffer. Fabrics commands use this.
    Sgl,
    /// An SGL; metadata, if any, is described by an SGL segment.
    SglMetadata,
    /// The reserved value 11b.
    Reserved,
}

impl Sqe {
    /// PSDT value of SGL in [`flags`](Self::flags), which every fabrics command carries.
    pub const FLAGS_SGL: u8 = 0x40;

    /// A command with only an opcode, and PSDT set to SGL as fabrics require.
    pub fn new(opcode: u8) -> Sqe {
        Sqe { opcode, flags: Self::FLAGS_SGL, ..Sqe::default() }
    }

    /// Decodes an entry. Costs eleven loads.
    #[inline]
    pub fn decode(from: &[u8; SIZE]) -> Sqe {
        Sqe {
            opcode: from[at::CDW0],
            flags: from[at::FLAGS],
            cid: u16_at(from, at::CID),
            nsid: u32_at(from, at::NSID),
            cdw2: u32_at(from, at::CDW2),
            cdw3: u32_at(from, at::CDW3),
            mptr: u64_at(from, at::MPTR),
            data: DataPointer { low: u64_at(from, at::DPTR), high: u64_at(from, at::DPTR + 8) },
            cdw10: u32_at(from, at::CDW10),
            cdw11: u32_at(from, at::CDW11),
            cdw12: u32_at(from, at::CDW12),
            cdw13: u32_at(from, at::CDW13),
            cdw14: u32_at(from, at::CDW14),
            cdw15: u32_at(from, at::CDW15),
        }
    }

    /// Encodes the entry; the exact inverse of [`decode`](Self::decode).
    #[inline]
    pub fn encode(&self, into: &mut [u8; SIZE]) {
        into[at::CDW0] = self.opcode;
        into[at::FLAGS] = self.flags;
        put16(into, at::CID, self.cid);
        put32(into, at::NSID, self.nsid);
        put32(into, at::CDW2, self.cdw2);
        put32(into, at::CDW3, self.cdw3);
        put64(into, at::MPTR, self.mptr);
        put64(into, at::DPTR, self.data.low);
        put64(into, at::DPTR + 8, self.data.high);
        put32(into, at::CDW10, self.cdw10);
        put32(into, at::CDW11, self.cdw11);
        put32(into, at::CDW12, self.cdw12);
        put32(into, at::CDW13, self.cdw13);
        put32(into, at::CDW14, self.cdw14);
        put32(into, at::CDW15, self.cdw15);
    }

    /// The encoded entry as eight little-endian words, for queues that are written a word at a time.
    #[inline(always)]
    pub const fn to_words(&self) -> [u64; SIZE / 8] {
        const fn pair(low: u32, high: u32) -> u64 {
            low as u64 | (high as u64) << 32
        }
        let cdw0 = self.opcode as u32 | (self.flags as u32) << 8 | (self.cid as u32) << 16;
        [
            pair(cdw0, self.nsid),
            pair(self.cdw2, self.cdw3),
            self.mptr,
            self.data.low,
            self.data.high,
            pair(self.cdw10, self.cdw11),
            pair(self.cdw12, self.cdw13),
            pair(self.cdw14, self.cdw15),
        ]
    }

    /// The entry as bytes.
    #[inline]
    pub fn to_bytes(&self) -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        self.encode(&mut bytes);
        bytes
    }

    /// Decodes FUSE.
    #[inline]
    pub const fn fuse(&self) -> Fuse {
        match self.flags & 3 {
            0 => Fuse::Normal,
            1 => Fuse::First,
            2 => Fuse::Second,
            _ => Fuse::Reserved,
        }
    }

    /// Decodes PSDT.
    #[inline]
    pub const fn psdt(&self) -> Psdt {
        match self.flags >> 6 {
            0 => Psdt::Prp,
            1 => Psdt::Sgl,
            2 => Psdt::SglMetadata,
            _ => Psdt::Reserved,
        }
    }
}

/// Data pointer: 16 bytes that are an SGL descriptor or two PRP entries, by PSDT.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct DataPointer {
    /// Bytes 0–7: SGL address or offset, or PRP entry 1.
    pub low: u64,
    /// Bytes 8–15: SGL length, key and identifier, or PRP entry 2.
    pub high: u64,
}

/// SGL descriptors by type and sub type (Base 2.0, section 4.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sgl {
    /// Data Block, sub type Address (00h).
    DataBlock {
        /// Address in the host's memory.
        address: u64,
        /// Bytes.
        length: u32,
    },
    /// Data Block, sub type Offset (01h): data in the command's own capsule.
    Capsule {
        /// Bytes from the start of the capsule's data.
        offset: u64,
        /// Bytes.
        length: u32,
    },
    /// Bit Bucket (10h): data that a read discards.
    BitBucket {
        /// Bytes.
        length: u32,
    },
    /// Segment (20h, 21h): the location of more descriptors.
    Segment {
        /// Whether `address` is an offset into the capsule.
        offset: bool,
        /// Whether the segment is the last one (30h, 31h).
        last: bool,
        /// Address or offset.
        address: u64,
        /// Bytes of descriptors.
        length: u32,
    },
    /// Keyed Data Block (40h, 4Fh): data for RDMA, with a remote key.
    Keyed {
        /// Remote address.
        address: u64,
        /// Bytes, at most 2^24 - 1.
        length: u32,
        /// Remote key.
        key: u32,
        /// Invalidate the key with the completion (sub type Fh).
        invalidate: bool,
    },
    /// Transport Data Block (5Ah): data whose location the transport defines.
    Transport {
        /// Bytes.
        length: u32,
    },
}

impl DataPointer {
    /// Identifier of a Data Block descriptor with an address.
    pub const DATA_BLOCK: u8 = 0x00;
    /// Identifier of a Data Block descriptor with an offset into the capsule.
    pub const CAPSULE: u8 = 0x01;
    /// Identifier of a Transport Data Block descriptor.
    pub const TRANSPORT: u8 = 0x5a;

    /// Two PRP entries.
    pub const fn prp(prp1: u64, prp2: u64) -> Self {
        DataPointer { low: prp1, high: prp2 }
    }

    /// Data in the capsule, `offset` bytes from the start of the capsule's data.
    pub const fn capsule(offset: u64, length: u32) -> Self {
        DataPointer { low: offset, high: length as u64 | (Self::CAPSULE as u64) << 56 }
    }

    /// A Transport Data Block descriptor: the transport defines the location of the data.
    pub const fn transport(length: u32) -> Self {
        DataPointer { low: 0, high: length as u64 | (Self::TRANSPORT as u64) << 56 }
    }

    /// The SGL identifier: type in the high nibble, sub type in the low one.
    #[inline]
    pub const fn identifier(&self) -> u8 {
        (self.high >> 56) as u8
    }

    /// The length of an SGL descriptor in bytes. That of a keyed one has 24 bits (Base 2.0, figure 111).
    #[inline]
    pub const fn length(&self) -> u32 {
        let length = self.high as u32;
        if self.high >> 60 == 0x4 { length & 0x00ff_ffff } else { length }
    }

    /// Decodes the SGL descriptor.
    ///
    /// # Errors
    /// Reserved and vendor specific types, and undefined combinations of type and sub type.
    pub fn sgl(&self) -> Result<Sgl, DecodeError> {
        let length = self.length();
        let identifier = self.identifier();
        Ok(match identifier {
            Self::DATA_BLOCK => Sgl::DataBlock { address: self.low, length },
            Self::CAPSULE => Sgl::Capsule { offset: self.low, length },
            0x10 => Sgl::BitBucket { length },
            0x20 | 0x21 | 0x30 | 0x31 => Sgl::Segment {
                offset: identifier & 1 != 0,
                last: identifier & 0x10 != 0,
                address: self.low,
                length,
            },
            0x40 | 0x4f => Sgl::Keyed {
                address: self.low,
                length: length & 0x00ff_ffff,
                key: (self.high >> 24) as u32,
                invalidate: identifier & 0xf != 0,
            },
            Self::TRANSPORT => Sgl::Transport { length },
            other => return Err(DecodeError::value("SGL identifier", 15, other.into())),
        })
    }
}

impl From<Sgl> for DataPointer {
    fn from(sgl: Sgl) -> Self {
        let pack = |low, length: u32, identifier: u8| DataPointer {
            low,
            high: u64::from(length) | u64::from(identifier) << 56,
        };
        match sgl {
            Sgl::DataBlock { address, length } => pack(address, length, Self::DATA_BLOCK),
            Sgl::Capsule { offset, length } => pack(offset, length, Self::CAPSULE),
            Sgl::BitBucket { length } => pack(0, length, 0x10),
            Sgl::Segment { offset, last, address, length } => {
                pack(address, length, 0x20 | u8::from(last) << 4 | u8::from(offset))
            }
            Sgl::Keyed { address, length, key, invalidate } => DataPointer {
                low: address,
                high: u64::from(length & 0x00ff_ffff)
                    | u64::from(key) << 24
                    | if invalidate { 0x4f } else { 0x40 } << 56,
            },
            Sgl::Transport { length } => pack(0, length, Self::TRANSPORT),
        }
    }
}
