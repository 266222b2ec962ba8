//! Parameters of a device.

use crate::DecodeError;

bitflags::bitflags! {
    /// Attributes of a device.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Attributes: u32 {
        /// Writes are rejected.
        const READ_ONLY = 1 << 0;
        /// The medium rotates.
        const ROTATIONAL = 1 << 1;
        /// Completed writes need a flush to be durable.
        const VOLATILE_CACHE = 1 << 2;
        /// Writes with FUA are served.
        const FUA = 1 << 3;
        const _ = !0;
    }
}

codec::fields! {
    /// Size, blocks and limits of a device (`ublk_param_basic`).
    BasicParameters, 32 {
        /// [`Attributes`].
        attributes: u32,
        /// Logarithm of the bytes of a logical block, to base 2.
        logical_block_shift: u8,
        /// Logarithm of the bytes of a physical block.
        physical_block_shift: u8,
        /// Logarithm of the optimal bytes of a request.
        optimal_io_shift: u8,
        /// Logarithm of the smallest preferred bytes of a request.
        minimum_io_shift: u8,
        /// Maximum sectors of a request.
        sectors_max: u32,
        /// Sectors that no request crosses a multiple of; 0 is no such limit.
        chunk_sectors: u32,
        /// Size in sectors.
        size_sectors: u64,
        /// Mask of the memory addresses where a request's pieces meet; 0 is no such limit.
        virtual_boundary_mask: u64,
    }
}

codec::fields! {
    /// Limits of discards and of zeroes (`ublk_param_discard`).
    DiscardParameters, 20 {
        /// Bytes from the start of the device to the first granule.
        alignment_bytes: u32,
        /// Bytes of a granule.
        granularity_bytes: u32,
        /// Maximum sectors of a discard; 0 where there is none.
        discard_sectors_max: u32,
        /// Maximum sectors of a request for zeroes; 0 where there is none.
        write_zeroes_sectors_max: u32,
        /// Maximum ranges of a discard.
        discard_segments_max: u16,
        /// Reserved, 0.
        reserved: u16,
    }
}

/// Parameters of a device (`ublk_params`), as far as a server sets them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UblkParameters {
    /// Size, blocks and limits.
    pub basic: BasicParameters,
    /// Limits of discards and of zeroes, for a device that has them.
    pub discard: Option<DiscardParameters>,
    /// Mask of the bits of memory addresses that are 0 in requests (`ublk_param_dma_align`, Linux 6.15), if
    /// it is not the driver's 3.
    pub alignment_mask: Option<u32>,
}

impl UblkParameters {
    /// Bytes of the structure.
    pub const SIZE: usize = ALIGNMENT_OFFSET + 8;
    /// Bytes of the structure of servers that set no alignment.
    const SIZE_MIN: usize = DISCARD_OFFSET + DiscardParameters::SIZE;

    /// Decodes the structure, as the driver returns it.
    ///
    /// # Errors
    /// `from` is shorter than [`SIZE`](Self::SIZE), the length in it than those without an alignment, or
    /// there are no basic parameters.
    pub fn decode(from: &[u8]) -> Result<UblkParameters, DecodeError> {
        let header = Header::decode(from)?;
        if (header.length as usize) < UblkParameters::SIZE_MIN {
            return Err(DecodeError::value("length of the parameters", 0, header.length.into()));
        }
        if from.len() < UblkParameters::SIZE {
            return Err(DecodeError::Length {
                what: "Parameters",
                got: from.len(),
                need: UblkParameters::SIZE,
            });
        }
        if header.types & TYPE_BASIC == 0 {
            return Err(DecodeError::value("types of parameters", 4, header.types.into()));
        }
        let basic = BasicParameters::decode(&from[Header::SIZE..])?;
        let has_discard = header.types & TYPE_DISCARD != 0;
        let discard = has_discard.then(|| DiscardParameters::decode(&from[DISCARD_OFFSET..])).transpose()?;
        let has_alignment =
            header.types & TYPE_DMA_ALIGNMENT != 0 && header.length as usize >= UblkParameters::SIZE;
        let alignment = || u32::from_le_bytes(std::array::from_fn(|index| from[ALIGNMENT_OFFSET + index]));
        Ok(UblkParameters { basic, discard, alignment_mask: has_alignment.then(alignment) })
    }

    /// Encodes the structure, its length included.
    pub fn to_bytes(&self) -> [u8; UblkParameters::SIZE] {
        let of = |is_there: bool, kind: u32| if is_there { kind } else { 0 };
        let types = TYPE_BASIC
            | of(self.discard.is_some(), TYPE_DISCARD)
            | of(self.alignment_mask.is_some(), TYPE_DMA_ALIGNMENT);
        let mut bytes = [0; UblkParameters::SIZE];
        bytes[..Header::SIZE]
            .copy_from_slice(&Header { length: UblkParameters::SIZE as u32, types }.to_bytes());
        bytes[Header::SIZE..DISCARD_OFFSET].copy_from_slice(&self.basic.to_bytes());
        if let Some(discard) = self.discard {
            bytes[DISCARD_OFFSET..UblkParameters::SIZE_MIN].copy_from_slice(&discard.to_bytes());
        }
        if let Some(mask) = self.alignment_mask {
            bytes[ALIGNMENT_OFFSET..ALIGNMENT_OFFSET + 4].copy_from_slice(&mask.to_le_bytes());
        }
        bytes
    }
}

codec::fields! {
    /// What the parameters begin with.
    Header, 8 {
        /// Bytes of the structure, this field included.
        length: u32,
        /// Which parameters are there.
        types: u32,
    }
}

const TYPE_BASIC: u32 = 1 << 0;
const TYPE_DISCARD: u32 = 1 << 1;
const TYPE_DMA_ALIGNMENT: u32 = 1 << 4;
const DISCARD_OFFSET: usize = Header::SIZE + BasicParameters::SIZE;
/// Numbers of the devices (16 bytes) and parameters of zones (32) are before it.
const ALIGNMENT_OFFSET: usize = DISCARD_OFFSET + DiscardParameters::SIZE + 16 + 32;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The bytes of a C program that filled the structure of `linux/ublk_cmd.h` of Linux 6.1, and what later
    /// kernels define: the length of a structure with an alignment, its type and its place.
    const GOLDEN: [u8; UblkParameters::SIZE] = with_alignment([
        0x74, 0, 0, 0, 0x13, 0, 0, 0, 0x0c, 0, 0, 0, 0x09, 0x0c, 0x10, 0x0d, 0, 0x08, 0, 0, 0, 0x01, 0, 0, 0,
        0, 0x20, 0, 0, 0, 0, 0, 0xff, 0x0f, 0, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0, 0x10, 0, 0, 0, 0, 0x01, 0, 0,
        0x80, 0, 0, 0x01, 0, 0, 0,
    ]);

    const fn with_alignment(bytes: [u8; UblkParameters::SIZE_MIN]) -> [u8; UblkParameters::SIZE] {
        let mut all = [0; UblkParameters::SIZE];
        let mut index = 0;
        while index < bytes.len() {
            all[index] = bytes[index];
            index += 1;
        }
        (all[108], all[109]) = (0xff, 0x01);
        all
    }

    #[test]
    fn parameters_have_the_bytes_of_the_kernel_header() {
        let basic = BasicParameters {
            attributes: (Attributes::VOLATILE_CACHE | Attributes::FUA).bits(),
            logical_block_shift: 9,
            physical_block_shift: 12,
            optimal_io_shift: 16,
            minimum_io_shift: 13,
            sectors_max: 2048,
            chunk_sectors: 256,
            size_sectors: 0x20_0000,
            virtual_boundary_mask: 0xfff,
        };
        let discard = DiscardParameters {
            alignment_bytes: 512,
            granularity_bytes: 4096,
            discard_sectors_max: 0x1_0000,
            write_zeroes_sectors_max: 0x8000,
            discard_segments_max: 1,
            reserved: 0,
        };
        let parameters = UblkParameters { basic, discard: Some(discard), alignment_mask: Some(511) };
        assert_eq!(parameters.to_bytes(), GOLDEN);
        assert_eq!(UblkParameters::decode(&GOLDEN).unwrap(), parameters);
        // Of a server that has set no alignment.
        let mut shorter = GOLDEN;
        shorter[0] = UblkParameters::SIZE_MIN as u8;
        assert_eq!(
            UblkParameters::decode(&shorter).unwrap(),
            UblkParameters { alignment_mask: None, ..parameters }
        );
    }

    #[test]
    fn parameters_without_a_basis_or_too_short_are_rejected() {
        assert!(UblkParameters::decode(&GOLDEN[..UblkParameters::SIZE - 1]).is_err());
        let mut short = GOLDEN;
        short[0] = 0x3b;
        assert!(UblkParameters::decode(&short).is_err());
        let mut without_basic = GOLDEN;
        without_basic[4] = 0x02;
        assert!(UblkParameters::decode(&without_basic).is_err());
    }

    proptest! {
        #[test]
        fn what_decodes_round_trips(rest: [u8; 32], more: [u8; 20], alignment: [u8; 4], types in 0_u8..32) {
            let mut bytes = GOLDEN;
            bytes[4] = types;
            bytes[Header::SIZE..DISCARD_OFFSET].copy_from_slice(&rest);
            bytes[DISCARD_OFFSET..UblkParameters::SIZE_MIN].copy_from_slice(&more);
            bytes[ALIGNMENT_OFFSET..ALIGNMENT_OFFSET + 4].copy_from_slice(&alignment);
            match UblkParameters::decode(&bytes) {
                Ok(parameters) => prop_assert_eq!(UblkParameters::decode(&parameters.to_bytes()).unwrap(), parameters),
                Err(_) => prop_assert_eq!(types & 1, 0),
            }
        }

        #[test]
        fn any_bytes_decode_or_fail(bytes in proptest::collection::vec(any::<u8>(), 0..150)) {
            let _ = UblkParameters::decode(&bytes);
        }
    }
}
