//! Discovery log page (Base 2.0, section 5.16.1.23).

use crate::DecodeError;
use crate::fabrics::Nqn;
use crate::le::{put, put16, put32, put64, u16_at, u32_at, u64_at};

wire_enum! {
    /// Transport types (TRTYPE).
    TransportType: u8 {
        /// RDMA.
        Rdma = 0x01,
        /// Fibre Channel.
        FibreChannel = 0x02,
        /// TCP.
        Tcp = 0x03,
        /// Within the host: loopback.
        IntraHost = 0xfe,
    }
}

wire_enum! {
    /// Address families (ADRFAM).
    AddressFamily: u8 {
        /// Not applicable.
        None = 0x00,
        /// IPv4, dotted decimal.
        Ipv4 = 0x01,
        /// IPv6.
        Ipv6 = 0x02,
        /// InfiniBand.
        InfiniBand = 0x03,
        /// Fibre Channel.
        FibreChannel = 0x04,
        /// Within the host.
        IntraHost = 0xfe,
    }
}

wire_enum! {
    /// Subsystem type of an entry (SUBTYPE).
    SubsystemType: u8 {
        /// Another discovery service: a referral.
        Referral = 0x01,
        /// An NVM subsystem.
        Nvm = 0x02,
        /// The current discovery subsystem.
        CurrentDiscovery = 0x03,
    }
}

wire_enum! {
    /// Secure channel requirement (TREQ bits 1:0).
    SecureChannel: u8 {
        /// Not specified.
        NotSpecified = 0,
        /// Required.
        Required = 1,
        /// Not required.
        NotRequired = 2,
    }
}

/// Transport address of a subsystem port.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransportAddress {
    /// Transport.
    pub trtype: TransportType,
    /// Address family.
    pub adrfam: AddressFamily,
    /// Address, at most 256 bytes of ASCII.
    pub traddr: String,
    /// Service, at most 32 bytes of ASCII: a port number for TCP.
    pub trsvcid: String,
}

/// One entry of the page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryEntry {
    /// Transport address.
    pub address: TransportAddress,
    /// Subsystem type.
    pub subtype: SubsystemType,
    /// Secure channel requirement.
    pub secure_channel: SecureChannel,
    /// SQ flow control can be disabled (TREQ bit 2).
    pub flow_control_optional: bool,
    /// Port identifier (PORTID).
    pub portid: u16,
    /// Controller identifier; FFFFh for the dynamic controller model.
    pub cntlid: u16,
    /// Largest admin submission queue in entries.
    pub admin_queue_entries_max: u16,
    /// Flags; see [`EXPLICIT_PERSISTENT`](Self::EXPLICIT_PERSISTENT).
    pub eflags: u16,
    /// Subsystem name.
    pub subnqn: Nqn,
    /// Security type of a TCP port (TSAS SECTYPE): 0 none, 2 TLS 1.3. 0 of other transports.
    pub tcp_security: u8,
}

mod at {
    pub(super) const TRTYPE: usize = 0;
    pub(super) const ADRFAM: usize = 1;
    pub(super) const SUBTYPE: usize = 2;
    pub(super) const TREQ: usize = 3;
    pub(super) const PORTID: usize = 4;
    pub(super) const CNTLID: usize = 6;
    pub(super) const ASQSZ: usize = 8;
    pub(super) const EFLAGS: usize = 10;
    pub(super) const TRSVCID: usize = 32;
    pub(super) const SUBNQN: usize = 256;
    pub(super) const TRADDR: usize = 512;
    pub(super) const TSAS: usize = 768;
}

impl DiscoveryEntry {
    /// Size in bytes of an entry.
    pub const SIZE: usize = 1024;
    /// EFLAGS: Duplicate Returned Information (DUPRETINFO).
    pub const DUPLICATE: u16 = 1 << 0;
    /// EFLAGS: Explicit Persistent Connection Support (EPCSD).
    pub const EXPLICIT_PERSISTENT: u16 = 1 << 1;

    /// Decodes an entry.
    ///
    /// # Errors
    /// Reserved types, text that is not UTF-8, and invalid NQNs.
    pub fn decode(from: &[u8; Self::SIZE]) -> Result<DiscoveryEntry, DecodeError> {
        let bad = |what, at: usize| DecodeError::value(what, at as u32, from[at].into());
        let text = |what, at: usize, length: usize| {
            let field = &from[at..at + length];
            let end = field.iter().position(|&byte| byte == 0).unwrap_or(length);
            let text = std::str::from_utf8(&field[..end]).map_err(|_| bad(what, at))?;
            Ok(text.trim_end_matches(' '))
        };
        let trtype = TransportType::from_wire(from[at::TRTYPE]).ok_or(bad("TRTYPE", at::TRTYPE))?;
        Ok(DiscoveryEntry {
            address: TransportAddress {
                trtype,
                adrfam: AddressFamily::from_wire(from[at::ADRFAM]).ok_or(bad("ADRFAM", at::ADRFAM))?,
                traddr: text("TRADDR", at::TRADDR, 256)?.to_owned(),
                trsvcid: text("TRSVCID", at::TRSVCID, 32)?.to_owned(),
            },
            subtype: SubsystemType::from_wire(from[at::SUBTYPE]).ok_or(bad("SUBTYPE", at::SUBTYPE))?,
            secure_channel: SecureChannel::from_wire(from[at::TREQ] & 3).ok_or(bad("TREQ", at::TREQ))?,
            flow_control_optional: from[at::TREQ] & 4 != 0,
            portid: u16_at(from, at::PORTID),
            cntlid: u16_at(from, at::CNTLID),
            admin_queue_entries_max: u16_at(from, at::ASQSZ),
            eflags: u16_at(from, at::EFLAGS),
            subnqn: Nqn::new(text("SUBNQN", at::SUBNQN, 256)?).map_err(|_| bad("SUBNQN", at::SUBNQN))?,
            tcp_security: if trtype == TransportType::Tcp { from[at::TSAS] } else { 0 },
        })
    }

    /// Encodes an entry.
    ///
    /// TRADDR and TRSVCID are ASCII strings, padded with spaces (Base 2.0, section 1.4.2).
    ///
    /// # Panics
    /// If an address or service is too long.
    pub fn encode(&self, into: &mut [u8; Self::SIZE]) {
        let TransportAddress { trtype, adrfam, traddr, trsvcid } = &self.address;
        assert!(traddr.len() <= 256 && trsvcid.len() <= 32, "the address {traddr} {trsvcid} is too long");
        *into = [0; Self::SIZE];
        into[at::TRTYPE] = trtype.to_wire();
        into[at::ADRFAM] = adrfam.to_wire();
        into[at::SUBTYPE] = self.subtype.to_wire();
        into[at::TREQ] = self.secure_channel.to_wire() | u8::from(self.flow_control_optional) << 2;
        put16(into, at::PORTID, self.portid);
        put16(into, at::CNTLID, self.cntlid);
        put16(into, at::ASQSZ, self.admin_queue_entries_max);
        put16(into, at::EFLAGS, self.eflags);
        into[at::TRSVCID..at::TRSVCID + 32].fill(b' ');
        put(into, at::TRSVCID, trsvcid.as_bytes());
        put(into, at::SUBNQN, self.subnqn.as_bytes());
        into[at::TRADDR..at::TRADDR + 256].fill(b' ');
        put(into, at::TRADDR, traddr.as_bytes());
        match *trtype {
            TransportType::Tcp => into[at::TSAS] = self.tcp_security,
            // A reliable connection, of any provider, made by RDMA_CM (RDMA Transport 1.0, section 3.5).
            TransportType::Rdma => into[at::TSAS..at::TSAS + 3].copy_from_slice(&[1, 1, 1]),
            _ => {}
        }
    }
}

/// The first 1024 bytes of the page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiscoveryHeader {
    /// Generation Counter (GENCTR): changes with every change of an entry.
    pub genctr: u64,
    /// Number of entries.
    pub numrec: u64,
    /// Record Format (RECFMT); only 0 is defined.
    pub recfmt: u16,
    /// Options of the log specific parameter that are applied (DLPF).
    pub dlpf: u8,
    /// Length of the whole page in bytes; only with extended entries (TDLPL).
    pub tdlpl: u32,
}

impl DiscoveryHeader {
    /// Size in bytes of the header.
    pub const SIZE: usize = 1024;

    /// Decodes the header.
    ///
    /// # Errors
    /// An unknown format.
    pub fn decode(from: &[u8; Self::SIZE]) -> Result<DiscoveryHeader, DecodeError> {
        let recfmt = u16_at(from, 16);
        if recfmt != 0 {
            return Err(DecodeError::value("RECFMT", 16, recfmt.into()));
        }
        Ok(DiscoveryHeader {
            genctr: u64_at(from, 0),
            numrec: u64_at(from, 8),
            recfmt,
            dlpf: from[18],
            tdlpl: u32_at(from, 20),
        })
    }

    /// Encodes the header.
    pub fn encode(&self, into: &mut [u8; Self::SIZE]) {
        *into = [0; Self::SIZE];
        put64(into, 0, self.genctr);
        put64(into, 8, self.numrec);
        put16(into, 16, self.recfmt);
        into[18] = self.dlpf;
        put32(into, 20, self.tdlpl);
    }
}
