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
pub struct Parameters {
    /// Size, blocks and limits.
    pub basic: BasicParameters,
    /// Limits of discards and of zeroes, for a device that has them.
    pub discard: Option<DiscardParameters>,
}

impl Parameters {
    /// Bytes of the structure.
    pub const SIZE: usize = DISCARD_OFFSET + DiscardParameters::SIZE;

    /// Decodes the structure, as the driver returns it.
    ///
    /// # Errors
    /// `from`, or the length in it, is shorter than [`SIZE`](Self::SIZE), or there are no basic parameters.
    pub fn decode(from: &[u8]) -> Result<Parameters, DecodeError> {
        let header = Header::decode(from)?;
        if (header.length as usize) < Parameters::SIZE {
            return Err(DecodeError::value("length of the parameters", 0, header.length.into()));
        }
        if from.len() < Parameters::SIZE {
            return Err(DecodeError::Length { what: "Parameters", got: from.len(), need: Parameters::SIZE });
        }
        if header.types & TYPE_BASIC == 0 {
            return Err(DecodeError::value("types of parameters", 4, header.types.into()));
        }
        let basic = BasicParameters::decode(&from[Header::SIZE..])?;
        let has_discard = header.types & TYPE_DISCARD != 0;
        let discard = has_discard.then(|| DiscardParameters::decode(&from[DISCARD_OFFSET..])).transpose()?;
        Ok(Parameters { basic, discard })
    }

    /// Encodes the structure, its length included.
    pub fn to_bytes(&self) -> [u8; Parameters::SIZE] {
        let types = TYPE_BASIC | if self.discard.is_some() { TYPE_DISCARD } else { 0 };
        let mut bytes = [0; Parameters::SIZE];
        bytes[..Header::SIZE].copy_from_slice(&Header { length: Parameters::SIZE as u32, types }.to_bytes());
        bytes[Header::SIZE..DISCARD_OFFSET].copy_from_slice(&self.basic.to_bytes());
        if let Some(discard) = self.discard {
            bytes[DISCARD_OFFSET..].copy_from_slice(&discard.to_bytes());
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
const DISCARD_OFFSET: usize = Header::SIZE + BasicParameters::SIZE;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The bytes of a C program that filled the structure of `linux/ublk_cmd.h`.
    const GOLDEN: [u8; Parameters::SIZE] = [
        0x3c, 0, 0, 0, 0x03, 0, 0, 0, 0x0c, 0, 0, 0, 0x09, 0x0c, 0x10, 0x0d, 0, 0x08, 0, 0, 0, 0x01, 0, 0, 0,
        0, 0x20, 0, 0, 0, 0, 0, 0xff, 0x0f, 0, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0, 0x10, 0, 0, 0, 0, 0x01, 0, 0,
        0x80, 0, 0, 0x01, 0, 0, 0,
    ];

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
        let parameters = Parameters { basic, discard: Some(discard) };
        assert_eq!(parameters.to_bytes(), GOLDEN);
        assert_eq!(Parameters::decode(&GOLDEN).unwrap(), parameters);
    }

    #[test]
    fn parameters_without_a_basis_or_too_short_are_rejected() {
        assert!(Parameters::decode(&GOLDEN[..Parameters::SIZE - 1]).is_err());
        let mut short = GOLDEN;
        short[0] = 0x3b;
        assert!(Parameters::decode(&short).is_err());
        let mut without_basic = GOLDEN;
        without_basic[4] = 0x02;
        assert!(Parameters::decode(&without_basic).is_err());
    }

    proptest! {
        #[test]
        fn what_decodes_round_trips(rest: [u8; 32], more: [u8; 20], types in 0_u8..8) {
            let mut bytes = GOLDEN;
            bytes[4] = types;
            bytes[Header::SIZE..DISCARD_OFFSET].copy_from_slice(&rest);
            bytes[DISCARD_OFFSET..].copy_from_slice(&more);
            match Parameters::decode(&bytes) {
                Ok(parameters) => prop_assert_eq!(Parameters::decode(&parameters.to_bytes()).unwrap(), parameters),
                Err(_) => prop_assert_eq!(types & 1, 0),
            }
        }

        #[test]
        fn any_bytes_decode_or_fail(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = Parameters::decode(&bytes);
        }
    }
}
