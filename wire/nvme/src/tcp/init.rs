//! PDUs that initialize and terminate a connection.

use super::{FatalError, FatalStatus, Framing, IC_SIZE, PFV, PduType, SHORT_SIZE, TERM_MAX};
use crate::le::{put, put16, put32, u16_at, u32_at};

/// Initialize Connection Request (TCP 1.0, section 3.6.2: ICReq).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcReq {
    /// Alignment in bytes of data that the controller sends (HPDA): 4 to 128 in steps of 4.
    pub host_data_alignment_bytes: u8,
    /// The host requests header digests.
    pub header_digest: bool,
    /// The host requests data digests.
    pub data_digest: bool,
    /// Maximum outstanding R2Ts per command (MAXR2T); at least 1.
    pub r2t_max: u64,
}

/// Initialize Connection Response (TCP 1.0, section 3.6.2: ICResp).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcResp {
    /// Alignment in bytes of data that the host sends (CPDA): 4 to 128 in steps of 4.
    pub controller_data_alignment_bytes: u8,
    /// Header digests are enabled.
    pub header_digest: bool,
    /// Data digests are enabled.
    pub data_digest: bool,
    /// Maximum data bytes per H2CData PDU (MAXH2CDATA); at least 4096.
    pub h2c_data_max_bytes: u32,
}

mod at {
    pub(super) const PFV: usize = 8;
    pub(super) const PDA: usize = 10;
    pub(super) const DGST: usize = 11;
    pub(super) const LIMIT: usize = 12;
    pub(super) const FES: usize = 8;
    pub(super) const FEI: usize = 10;
}

/// Minimum of MAXH2CDATA (TCP 1.0, section 3.6.2: ICResp).
const MAXH2CDATA_MIN: u32 = 4096;

impl IcReq {
    /// Decodes the PDU; the caller has checked the common header.
    ///
    /// # Errors
    /// An unknown format version (Unsupported Parameter), an HPDA above 31, or reserved digest bits.
    pub fn decode(from: &[u8; IC_SIZE]) -> Result<IcReq, FatalError> {
        let common = IcCommon::decode(from)?;
        Ok(IcReq {
            host_data_alignment_bytes: common.alignment,
            header_digest: common.header_digest,
            data_digest: common.data_digest,
            r2t_max: u64::from(u32_at(from, at::LIMIT)) + 1,
        })
    }

    /// Encodes the whole PDU.
    ///
    /// # Panics
    /// If a field is out of the range given in its documentation.
    pub fn encode(&self, into: &mut [u8; IC_SIZE]) {
        let common = IcCommon {
            alignment: self.host_data_alignment_bytes,
            header_digest: self.header_digest,
            data_digest: self.data_digest,
        };
        common.encode(PduType::IcReq, into);
        let r2t_max = self.r2t_max.checked_sub(1).and_then(|max| u32::try_from(max).ok());
        put32(into, at::LIMIT, r2t_max.expect("1 to 2^32 R2Ts may be outstanding"));
    }
}

impl IcResp {
    /// Decodes the PDU; the caller has checked the common header.
    ///
    /// # Errors
    /// Like [`IcReq::decode`], and a MAXH2CDATA below 4096 or not a multiple of 4.
    pub fn decode(from: &[u8; IC_SIZE]) -> Result<IcResp, FatalError> {
        let common = IcCommon::decode(from)?;
        let h2c_data_max_bytes = u32_at(from, at::LIMIT);
        if h2c_data_max_bytes < MAXH2CDATA_MIN || !h2c_data_max_bytes.is_multiple_of(4) {
            return Err(FatalError::field(at::LIMIT as u32));
        }
        Ok(IcResp {
            controller_data_alignment_bytes: common.alignment,
            header_digest: common.header_digest,
            data_digest: common.data_digest,
            h2c_data_max_bytes,
        })
    }

    /// Encodes the whole PDU.
    ///
    /// # Panics
    /// If a field is out of the range given in its documentation.
    pub fn encode(&self, into: &mut [u8; IC_SIZE]) {
        let common = IcCommon {
            alignment: self.controller_data_alignment_bytes,
            header_digest: self.header_digest,
            data_digest: self.data_digest,
        };
        common.encode(PduType::IcResp, into);
        assert!(
            self.h2c_data_max_bytes >= MAXH2CDATA_MIN && self.h2c_data_max_bytes.is_multiple_of(4),
            "MAXH2CDATA of {} bytes is below 4096 or not a multiple of 4",
            self.h2c_data_max_bytes
        );
        put32(into, at::LIMIT, self.h2c_data_max_bytes);
    }
}

/// The fields that request and response share.
struct IcCommon {
    alignment: u8,
    header_digest: bool,
    data_digest: bool,
}

impl IcCommon {
    fn decode(from: &[u8; IC_SIZE]) -> Result<IcCommon, FatalError> {
        if u16_at(from, at::PFV) != PFV {
            return Err(FatalError::unsupported(at::PFV as u32));
        }
        // PDA is a 0's based number of dwords.
        if from[at::PDA] > 31 {
            return Err(FatalError::field(at::PDA as u32));
        }
        if from[at::DGST] & !3 != 0 {
            return Err(FatalError::field(at::DGST as u32));
        }
        Ok(IcCommon {
            alignment: (from[at::PDA] + 1) * 4,
            header_digest: from[at::DGST] & 1 != 0,
            data_digest: from[at::DGST] & 2 != 0,
        })
    }

    fn encode(&self, kind: PduType, into: &mut [u8; IC_SIZE]) {
        assert!(
            (4..=128).contains(&self.alignment) && self.alignment.is_multiple_of(4),
            "data alignment of {} bytes is not 4 to 128 in steps of 4",
            self.alignment
        );
        *into = [0; IC_SIZE];
        Framing::PLAIN.write(kind, 0, 0, into);
        put16(into, at::PFV, PFV);
        into[at::PDA] = self.alignment / 4 - 1;
        into[at::DGST] = u8::from(self.header_digest) | u8::from(self.data_digest) << 1;
    }
}

/// Terminate Connection Request, in either direction (TCP 1.0, section 3.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TermReq {
    /// [`PduType::C2hTermReq`] or [`PduType::H2cTermReq`].
    pub kind: PduType,
    /// The fatal error.
    pub fatal: FatalError,
}

impl TermReq {
    /// Decodes the header behind its common header, which the caller has checked. The data, a copy of
    /// the header in error, follows.
    ///
    /// # Errors
    /// A reserved status.
    pub fn decode(kind: PduType, from: &[u8; SHORT_SIZE]) -> Result<TermReq, FatalError> {
        let status = FatalStatus::from_u16(u16_at(from, at::FES)).ok_or(FatalError::field(at::FES as u32))?;
        Ok(TermReq { kind, fatal: FatalError { status, information: u32_at(from, at::FEI) } })
    }

    /// Encodes the whole PDU and returns its length. `in_error` is the invalid header, of
    /// which at most 128 bytes are included.
    pub fn encode(&self, in_error: &[u8], into: &mut [u8; TERM_MAX]) -> usize {
        let in_error = &in_error[..in_error.len().min(TERM_MAX - SHORT_SIZE)];
        *into = [0; TERM_MAX];
        let layout = Framing::PLAIN.write(self.kind, 0, in_error.len() as u32, into);
        // PDO is reserved here.
        into[3] = 0;
        put16(into, at::FES, self.fatal.status as u16);
        put32(into, at::FEI, self.fatal.information);
        put(into, SHORT_SIZE, in_error);
        layout.length as usize
    }
}
