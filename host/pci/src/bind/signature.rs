//! Detection of file systems, volume managers and partition tables by their signatures (magic numbers).
//!
//! It checks only offsets and bytes: a signature means that a device may have data, and nothing more is
//! needed. Signatures at fixed offsets are in a [table](SIGNATURES); functions below it check those that
//! depend on the device size or on several offsets.

use std::fmt;

/// Bytes at the start of a device that are checked: the last signature (VMFS) is just above 1 MiB.
pub const HEAD_BYTES: u64 = (1 << 20) + 4096;
/// Bytes at the end of a device that are checked: ZFS has two labels there.
pub const TAIL_BYTES: u64 = 768 << 10;

/// The kind of contents that a signature identifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignatureKind {
    /// A file system.
    FileSystem,
    /// Swap space, or a hibernation image.
    Swap,
    /// A member of an array, a pool or a volume group, or an encrypted device.
    Member,
    /// A partition table.
    Partitions,
}

/// A known signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature {
    /// The name of the format.
    pub name: &'static str,
    /// The kind of contents.
    pub kind: SignatureKind,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            SignatureKind::FileSystem => write!(f, "{} file system", self.name),
            SignatureKind::Swap => write!(f, "{} space", self.name),
            SignatureKind::Member => write!(f, "{} member", self.name),
            SignatureKind::Partitions => write!(f, "{} partition table", self.name),
        }
    }
}

const fn file_system(name: &'static str) -> Signature {
    Signature { name, kind: SignatureKind::FileSystem }
}

const fn member(name: &'static str) -> Signature {
    Signature { name, kind: SignatureKind::Member }
}

const fn swap(name: &'static str) -> Signature {
    Signature { name, kind: SignatureKind::Swap }
}

const fn partitions(name: &'static str) -> Signature {
    Signature { name, kind: SignatureKind::Partitions }
}

/// Signatures at fixed offsets: the signature, its possible offsets, its bytes.
const SIGNATURES: &[(Signature, &[u64], &[u8])] = &[
    (file_system("ext2/3/4"), &[0x438], &[0x53, 0xef]),
    (file_system("xfs"), &[0], b"XFSB"),
    (file_system("btrfs"), &[0x1_0040], b"_BHRfS_M"),
    (file_system("vfat"), &[0x52], b"FAT32   "),
    (file_system("vfat"), &[0x36], b"FAT16   "),
    (file_system("vfat"), &[0x36], b"FAT12   "),
    (file_system("vfat"), &[0x36], b"FAT     "),
    (file_system("exfat"), &[3], b"EXFAT   "),
    (file_system("ntfs"), &[3], b"NTFS    "),
    (member("BitLocker"), &[3], b"-FVE-FS-"),
    (file_system("f2fs"), &[0x400], &[0x10, 0x20, 0xf5, 0xf2]),
    (file_system("squashfs"), &[0], b"hsqs"),
    (file_system("squashfs"), &[0], b"sqsh"),
    (file_system("erofs"), &[0x400], &[0xe2, 0xe1, 0xf5, 0xe0]),
    (file_system("cramfs"), &[0], &[0x45, 0x3d, 0xcd, 0x28]),
    (file_system("jfs"), &[0x8000], b"JFS1"),
    (file_system("reiserfs"), &[0x1_0034], b"ReIsEr"),
    (file_system("nilfs2"), &[0x406], &[0x34, 0x34]),
    (file_system("hfsplus"), &[0x400], b"H+\x00\x04"),
    (file_system("hfsplus"), &[0x400], b"HX\x00\x05"),
    (file_system("apfs"), &[0x20], b"NXSB"),
    (file_system("iso9660"), &[0x8001], b"CD001"),
    (file_system("udf"), &[0x8001], b"BEA01"),
    (file_system("gfs2"), &[0x1_0000], &[0x01, 0x16, 0x19, 0x70, 0, 0, 0, 1]),
    (file_system("ocfs2"), &[0x400, 0x800, 0x1000, 0x2000], b"OCFSV2"),
    (file_system("ufs"), &[0x255c], &[0x54, 0x19, 0x01, 0x00]),
    (file_system("ufs2"), &[0x1_055c], &[0x19, 0x01, 0x54, 0x19]),
    (file_system("vmfs"), &[0x10_0000], &[0x0d, 0xd0, 0x01, 0xc0]),
    (file_system("bcachefs"), &[0x1018], b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"),
    (member("bcache"), &[0x1018], b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
    (member("LUKS"), &[0], b"LUKS\xba\xbe"),
    // LUKS2 has a second header at one of these offsets, or at two others beyond the checked bytes.
    (member("LUKS"), &[0x4000, 0x8000, 0x1_0000, 0x2_0000, 0x4_0000, 0x8_0000, 0x10_0000], b"SKUL\xba\xbe"),
    // The label of a physical volume is in one of the first four sectors.
    (member("LVM2"), &[0, 0x200, 0x400, 0x600], b"LABELONE"),
    (member("MD RAID 1.1"), &[0], &[0xfc, 0x4e, 0x2b, 0xa9]),
    (member("MD RAID 1.2"), &[0x1000], &[0xfc, 0x4e, 0x2b, 0xa9]),
    (member("dm-integrity"), &[0], b"integrt\0"),
    (member("dm-verity"), &[0], b"verity\0\0"),
    (member("VDO"), &[0], b"dmvdo001"),
    (member("Stratis"), &[0x204, 0x1204], b"!Stra0tis\x86\xff\x02^\x41rh"),
    (member("Ceph BlueStore"), &[0], b"bluestore block device\n"),
    (member("SPDK blobstore"), &[0], b"SPDKBLOB"),
    (member("Oracle ASM"), &[0x20], b"ORCLDISK"),
    (partitions("GPT"), &[0x200, 0x1000], b"EFI PART"),
    (partitions("Apple"), &[0x200], b"PM\0\0"),
    (partitions("BSD"), &[0x200], &[0x57, 0x45, 0x56, 0x82]),
    (swap("swap"), &SWAP_ENDS, b"SWAPSPACE2"),
    (swap("swap"), &SWAP_ENDS, b"SWAP-SPACE"),
    (swap("suspend-to-disk"), &SWAP_ENDS, b"S1SUSPEND\0"),
    (swap("suspend-to-disk"), &SWAP_ENDS, b"S2SUSPEND\0"),
    (swap("suspend-to-disk"), &SWAP_ENDS, b"ULSUSPEND\0"),
    (swap("suspend-to-disk"), &SWAP_ENDS, b"LINHIB0001"),
];

/// The swap signature is the last ten bytes of the first page, for any page size.
const SWAP_ENDS: [u64; 5] = [4096 - 10, 8192 - 10, 16384 - 10, 32768 - 10, 65536 - 10];

/// The checked bytes at the start and the end of a device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceExtract<'a> {
    /// Size of the device in bytes.
    pub bytes: u64,
    /// Its first bytes.
    pub head: &'a [u8],
    /// Its last bytes.
    pub tail: &'a [u8],
}

impl DeviceExtract<'_> {
    /// `length` bytes at `offset` of the device, if they were read.
    fn at(&self, offset: u64, length: usize) -> Option<&[u8]> {
        let end = offset.checked_add(length as u64).filter(|end| *end <= self.bytes)?;
        if end <= self.head.len() as u64 {
            return self.head.get(offset as usize..end as usize);
        }
        let from = offset.checked_sub(self.bytes.checked_sub(self.tail.len() as u64)?)? as usize;
        self.tail.get(from..from + length)
    }

    fn has(&self, offset: Option<u64>, magic: &[u8]) -> bool {
        offset.and_then(|offset| self.at(offset, magic.len())) == Some(magic)
    }

    /// The offset `back` bytes before the end, after the size is rounded down to a multiple of `unit`.
    fn offset_from_end(&self, unit: u64, back: u64) -> Option<u64> {
        (self.bytes / unit * unit).checked_sub(back)
    }
}

/// Detects all known signatures, without duplicates.
pub fn detect_signatures(device: DeviceExtract<'_>) -> Vec<Signature> {
    let mut found: Vec<Signature> = Vec::new();
    let mut add = |signature: Signature, present: bool| {
        if present && !found.contains(&signature) {
            found.push(signature);
        }
    };
    for (signature, offsets, magic) in SIGNATURES {
        add(*signature, offsets.iter().any(|offset| device.has(Some(*offset), magic)));
    }
    add(member("MD RAID 1.0"), md_1_0(device));
    add(member("MD RAID 0.90"), md_0_90(device));
    add(member("ZFS"), zfs(device));
    add(member("DRBD"), drbd(device));
    add(member("Intel RAID"), device.has(device.offset_from_end(512, 1024), b"Intel Raid ISM Cfg Sig. "));
    add(member("DDF RAID"), device.has(device.offset_from_end(512, 512), &[0xde, 0x11, 0xde, 0x11]));
    // The backup header at the end survives if the start was overwritten.
    let copy =
        [512, 4096].iter().any(|sector| device.has(device.offset_from_end(*sector, *sector), b"EFI PART"));
    add(partitions("GPT"), copy);
    let boot_sector = device.has(Some(510), &[0x55, 0xaa]);
    // The boot sectors of FAT and NTFS and the protective MBR of a GPT have the same two bytes.
    let explained =
        found.iter().any(|one| matches!(one.name, "vfat" | "ntfs" | "exfat" | "BitLocker" | "GPT"));
    if boot_sector && !explained {
        found.push(partitions("MBR"));
    }
    found
}

/// The version 1.0 superblock is between 8 and 12 KiB from the end, at a multiple of 4 KiB.
fn md_1_0(device: DeviceExtract<'_>) -> bool {
    let at = device.bytes.checked_sub(8192).map(|offset| offset / 4096 * 4096);
    device.has(at, &[0xfc, 0x4e, 0x2b, 0xa9])
}

/// The version 0.90 superblock is in the last whole 64 KiB block, in either byte order.
fn md_0_90(device: DeviceExtract<'_>) -> bool {
    let at = device.offset_from_end(65536, 65536);
    device.has(at, &[0xfc, 0x4e, 0x2b, 0xa9]) || device.has(at, &[0xa9, 0x2b, 0x4e, 0xfc])
}

/// Four labels of 256 KiB, two at each end; the upper half of each is an array of uberblocks, at multiples of 1 KiB
/// or more.
fn zfs(device: DeviceExtract<'_>) -> bool {
    const LABEL: u64 = 256 << 10;
    const LITTLE: [u8; 8] = 0x00ba_b10c_u64.to_le_bytes();
    const BIG: [u8; 8] = 0x00ba_b10c_u64.to_be_bytes();
    let labels = [
        Some(0),
        Some(LABEL),
        device.offset_from_end(LABEL, 2 * LABEL),
        device.offset_from_end(LABEL, LABEL),
    ];
    labels.into_iter().flatten().any(|label| {
        let offsets = (label + LABEL / 2..label + LABEL).step_by(1024);
        offsets.into_iter().any(|at| device.has(Some(at), &LITTLE) || device.has(Some(at), &BIG))
    })
}

/// Internal metadata is in the last 4 KiB; the offset of the magic number depends on the version.
fn drbd(device: DeviceExtract<'_>) -> bool {
    let Some(block) = device.offset_from_end(4096, 4096) else { return false };
    let magics: [&[u8]; 2] = [&[0x83, 0x74, 0x02, 0x6b], &[0x83, 0x74, 0x02, 0x6d]];
    (block..block + 128).step_by(4).any(|at| magics.iter().any(|magic| device.has(Some(at), magic)))
}

#[cfg(test)]
mod tests;
