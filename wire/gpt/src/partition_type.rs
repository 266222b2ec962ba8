//! Types of partitions by the names that people use for them.

use uuid::Uuid;

/// The type of a partition. Any GUID may be one; some have names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartitionType(pub Uuid);

/// Names and GUIDs, which are of the UEFI specification and of the systems that use them.
const NAMES: [(&str, u128); 12] = [
    ("spdk", 0x6527_994e_2c5a_4eec_9613_8f59_4407_4e8b),
    ("spdk-old", 0x7c52_22bd_8f5d_4087_9c00_bf98_43c7_b58c),
    ("efi", 0xc12a_7328_f81f_11d2_ba4b_00a0_c93e_c93b),
    ("bios-boot", 0x2168_6148_6449_6e6f_744e_6565_6445_4649),
    ("linux", 0x0fc6_3daf_8483_4772_8e79_3d69_d847_7de4),
    ("swap", 0x0657_fd6d_a4ab_43c4_84e5_0933_c84b_4f4f),
    ("lvm", 0xe6d6_d379_f507_44c2_a23c_238f_2a3d_f928),
    ("raid", 0xa19d_880f_05fc_4d3b_a006_743f_0f84_911e),
    ("linux-home", 0x933a_c7e1_2eb4_4f13_b844_0e14_e2ae_f915),
    ("microsoft-basic", 0xebd0_a0a2_b9e5_4433_87c0_68b6_b726_99c7),
    ("microsoft-reserved", 0xe3c9_e316_0b5c_4db8_817d_f92d_f002_15ae),
    ("freebsd-zfs", 0x516e_7cba_6ecf_11d6_8ff8_0002_2d09_712b),
];

impl PartitionType {
    /// SPDK's partitions.
    pub const SPDK: PartitionType = PartitionType(Uuid::from_u128(NAMES[0].1));
    /// SPDK's partitions of earlier versions, of which the last block is not used.
    pub const SPDK_OLD: PartitionType = PartitionType(Uuid::from_u128(NAMES[1].1));

    /// The type with this name, in any case, or this GUID.
    pub fn parse(text: &str) -> Option<PartitionType> {
        let named = NAMES.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
        match named {
            Some((_, guid)) => Some(PartitionType(Uuid::from_u128(*guid))),
            None => Uuid::try_parse(text).ok().filter(|guid| !guid.is_nil()).map(PartitionType),
        }
    }

    /// The names that [`parse`](Self::parse) knows.
    pub fn names() -> impl Iterator<Item = &'static str> {
        NAMES.iter().map(|(name, _)| *name)
    }
}
