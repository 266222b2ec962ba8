//! PDUs that open and terminate a connection.

use super::{Fatal, FatalStatus, Framing, IC_SIZE, PFV, PduType, SHORT_SIZE, TERM_MAX};
use crate::le::{put, put16, put32, u16_at, u32_at};

/// Initialize Connection Request (TCP 1.0, section 3.6.2: ICReq).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcReq {
    /// Alignment in bytes of data that the controller sends (HPDA): 4 to 128 in steps of 4.
    pub host_data_alignment_bytes: u8,
    /// The host wants header digests.
    pub header_digest: bool,
    /// The host wants data digests.
    pub data_digest: bool,
    /// R2Ts that may be outstanding for one command (MAXR2T); at least 1.
    pub r2t_max: u64,
}

/// Initialize Connection Response (TCP 1.0, section 3.6.2: ICResp).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcResp {
    /// Alignment in bytes of data that the host sends (CPDA): 4 to 128 in steps of 4.
    pub controller_data_alignment_bytes: u8,
    /// Header digests are on.
    pub header_digest: bool,
    /// Data digests are on.
    pub data_digest: bool,
    /// Bytes of data that the host may put into one H2CData PDU (MAXH2CDATA); at least 4096.
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

/// MAXH2CDATA may not be less (TCP 1.0, section 3.6.2: ICResp).
const H2C_DATA_MAX_LEAST: u32 = 4096;

impl IcReq {
    /// Reads the PDU behind its common header, which the caller has checked.
    ///
    /// # Errors
    /// An unknown format version, which is an unsupported parameter, an HPDA over 31 and reserved
    /// digest bits.
    pub fn decode(from: &[u8; IC_SIZE]) -> Result<IcReq, Fatal> {
        let common = Common::decode(from)?;
        Ok(IcReq {
            host_data_alignment_bytes: common.alignment,
            header_digest: common.header_digest,
            data_digest: common.data_digest,
            r2t_max: u64::from(u32_at(from, at::LIMIT)) + 1,
        })
    }

    /// Writes the whole PDU.
    ///
    /// # Panics
    /// When a field is outside of the range that it names.
    pub fn encode(&self, into: &mut [u8; IC_SIZE]) {
        let common = Common {
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
    /// Reads the PDU behind its common header, which the caller has checked.
    ///
    /// # Errors
    /// As [`IcReq::decode`], and a MAXH2CDATA under 4096 or no multiple of 4.
    pub fn decode(from: &[u8; IC_SIZE]) -> Result<IcResp, Fatal> {
        let common = Common::decode(from)?;
        let h2c_data_max_bytes = u32_at(from, at::LIMIT);
        if h2c_data_max_bytes < H2C_DATA_MAX_LEAST || !h2c_data_max_bytes.is_multiple_of(4) {
            return Err(Fatal::field(at::LIMIT as u32));
        }
        Ok(IcResp {
            controller_data_alignment_bytes: common.alignment,
            header_digest: common.header_digest,
            data_digest: common.data_digest,
            h2c_data_max_bytes,
        })
    }

    /// Writes the whole PDU.
    ///
    /// # Panics
    /// When a field is outside of the range that it names.
    pub fn encode(&self, into: &mut [u8; IC_SIZE]) {
        let common = Common {
            alignment: self.controller_data_alignment_bytes,
            header_digest: self.header_digest,
            data_digest: self.data_digest,
        };
        common.encode(PduType::IcResp, into);
        assert!(
            self.h2c_data_max_bytes >= H2C_DATA_MAX_LEAST && self.h2c_data_max_bytes.is_multiple_of(4),
            "MAXH2CDATA of {} bytes is under 4096 or no multiple of 4",
            self.h2c_data_max_bytes
        );
        put32(into, at::LIMIT, self.h2c_data_max_bytes);
    }
}

/// The fields that request and response share.
struct Common {
    alignment: u8,
    header_digest: bool,
    data_digest: bool,
}

impl Common {
    fn decode(from: &[u8; IC_SIZE]) -> Result<Common, Fatal> {
        if u16_at(from, at::PFV) != PFV {
            return Err(Fatal::unsupported(at::PFV as u32));
        }
        // PDA is a number of dwords, counted from 0.
        if from[at::PDA] > 31 {
            return Err(Fatal::field(at::PDA as u32));
        }
        if from[at::DGST] & !3 != 0 {
            return Err(Fatal::field(at::DGST as u32));
        }
        Ok(Common {
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

/// Terminate Connection Request, either way (TCP 1.0, section 3.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TermReq {
    /// [`PduType::C2hTermReq`] or [`PduType::H2cTermReq`].
    pub kind: PduType,
    /// Why.
    pub fatal: Fatal,
}

impl TermReq {
    /// Reads the header behind its common header, which the caller has checked. The data, a copy of
    /// the header in error, follows.
    ///
    /// # Errors
    /// A status that TCP 1.0 reserves.
    pub fn decode(kind: PduType, from: &[u8; SHORT_SIZE]) -> Result<TermReq, Fatal> {
        let status = FatalStatus::from_u16(u16_at(from, at::FES)).ok_or(Fatal::field(at::FES as u32))?;
        Ok(TermReq { kind, fatal: Fatal { status, information: u32_at(from, at::FEI) } })
    }

    /// Writes the whole PDU and returns its length. `in_error` is the header that caused it, of which
    /// at most 128 bytes are sent.
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
