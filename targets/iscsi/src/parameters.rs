//! The negotiation of operational parameters (RFC 7143, section 13).

use wire_iscsi::text::{self, IRRELEVANT, NOT_UNDERSTOOD, REJECT};
use wire_iscsi::{LoginStatus, TextWriter};

use crate::limits::{
    BURST_BYTES_MAX, FIRST_BURST_BYTES_MAX, R2TS_MAX, RECEIVE_DATA_MAX, TIME2WAIT_DEFAULT_S, TIME2WAIT_MAX_S,
};

/// What applies to a connection and its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parameters {
    pub(crate) header_digest: bool,
    pub(crate) data_digest: bool,
    /// No Data-Out comes without an R2T.
    pub(crate) initial_r2t: bool,
    /// Commands may carry data.
    pub(crate) immediate_data: bool,
    /// Most data of a PDU that the initiator receives.
    pub(crate) send_data_max: u32,
    pub(crate) burst_bytes_max: u32,
    pub(crate) first_burst_bytes_max: u32,
    pub(crate) r2ts_max: u32,
    /// Connections of the session.
    pub(crate) connections_max: u32,
}

impl Default for Parameters {
    /// Those of RFC 7143, until they are negotiated.
    fn default() -> Self {
        Parameters {
            header_digest: false,
            data_digest: false,
            initial_r2t: true,
            immediate_data: true,
            send_data_max: 8192,
            burst_bytes_max: 256 << 10,
            first_burst_bytes_max: 64 << 10,
            r2ts_max: 1,
            connections_max: 1,
        }
    }
}

impl Parameters {
    /// Those of the connection, with what applies to its session.
    pub(crate) fn with_session(self, session: &Parameters) -> Parameters {
        let Parameters { header_digest, data_digest, send_data_max, .. } = self;
        Parameters { header_digest, data_digest, send_data_max, ..*session }
    }
}

/// What the target's options say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OptionPolicy {
    pub(crate) immediate_data: bool,
    pub(crate) first_burst_bytes_max: u32,
    /// Least DefaultTime2Wait, in seconds.
    pub(crate) time2wait_s: u32,
}

impl Default for OptionPolicy {
    fn default() -> Self {
        OptionPolicy {
            immediate_data: true,
            first_burst_bytes_max: FIRST_BURST_BYTES_MAX,
            time2wait_s: TIME2WAIT_DEFAULT_S,
        }
    }
}

/// What a target node wants of digests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DigestPolicy {
    pub(crate) header_required: bool,
    pub(crate) data_required: bool,
}

/// The parameters of a login, as far as they are negotiated.
#[derive(Debug, Default)]
pub(crate) struct Negotiation {
    pub(crate) parameters: Parameters,
    pub(crate) is_discovery: bool,
    /// The connection joins a session, whose parameters it cannot change.
    pub(crate) is_joining: bool,
    /// Connections of a session, as the target wants it; 0 is as 1.
    pub(crate) connections_max: u32,
    pub(crate) digests: DigestPolicy,
    pub(crate) options: OptionPolicy,
    /// Bits of [`KEYS`] that were offered: each may be once.
    offered: u32,
    /// The target has declared its own parameters.
    has_declared: bool,
}

/// Most data of a PDU that either side may declare.
const DATA_MAX: u64 = (1 << 24) - 1;

/// Keys that are answered, or that the initiator declares.
const KEYS: &[&str] = &[
    "HeaderDigest",
    "DataDigest",
    "MaxConnections",
    "InitialR2T",
    "ImmediateData",
    "MaxRecvDataSegmentLength",
    "MaxBurstLength",
    "FirstBurstLength",
    "DefaultTime2Wait",
    "DefaultTime2Retain",
    "MaxOutstandingR2T",
    "DataPDUInOrder",
    "DataSequenceInOrder",
    "ErrorRecoveryLevel",
    "TaskReporting",
    "iSCSIProtocolLevel",
];

impl Negotiation {
    /// Handles a key of the initiator; the answer goes to `out`.
    ///
    /// # Errors
    /// The login fails: the key was offered before, or its value is no value of the key.
    pub(crate) fn offer(&mut self, key: &str, value: &str, out: &mut TextWriter) -> Result<(), LoginStatus> {
        if let Some(index) = KEYS.iter().position(|known| *known == key) {
            if self.offered & 1 << index != 0 {
                return Err(LoginStatus::InitiatorError);
            }
            self.offered |= 1 << index;
        }
        if matches!(value, REJECT | NOT_UNDERSTOOD | IRRELEVANT) {
            // An answer to what the target has declared.
            return Ok(());
        }
        let answer = match self.answer(key, value) {
            Ok(Some(answer)) => answer,
            Ok(None) => return Ok(()),
            Err(InvalidValue) if key == "MaxRecvDataSegmentLength" => {
                return Err(LoginStatus::InitiatorError);
            }
            Err(InvalidValue) => REJECT.to_string(),
        };
        out.push(key, &answer);
        Ok(())
    }

    /// The answer to a key; `None` for a declaration.
    fn answer(&mut self, key: &str, value: &str) -> Result<Option<String>, InvalidValue> {
        let parameters = &mut self.parameters;
        if self.is_discovery && is_of_full_feature(key) {
            return Ok(Some(IRRELEVANT.to_string()));
        }
        if self.is_joining && is_of_session(key) {
            return Err(InvalidValue);
        }
        let answer = match key {
            "HeaderDigest" => digest(value, self.digests.header_required, &mut parameters.header_digest)?,
            "DataDigest" => digest(value, self.digests.data_required, &mut parameters.data_digest)?,
            "MaxConnections" => {
                parameters.connections_max = minimum(value, self.connections_max.max(1), 1..=65535)?;
                parameters.connections_max.to_string()
            }
            "InitialR2T" => {
                parameters.initial_r2t = boolean(value)?;
                yes_no(parameters.initial_r2t)
            }
            "ImmediateData" => {
                parameters.immediate_data = boolean(value)? && self.options.immediate_data;
                yes_no(parameters.immediate_data)
            }
            "MaxRecvDataSegmentLength" => {
                parameters.send_data_max = number(value, 512..=DATA_MAX)?;
                return Ok(None);
            }
            "MaxBurstLength" => {
                parameters.burst_bytes_max = minimum(value, BURST_BYTES_MAX, 512..=DATA_MAX)?;
                parameters.burst_bytes_max.to_string()
            }
            "FirstBurstLength" => {
                parameters.first_burst_bytes_max =
                    minimum(value, self.options.first_burst_bytes_max, 512..=DATA_MAX)?;
                parameters.first_burst_bytes_max.to_string()
            }
            "DefaultTime2Wait" => {
                number(value, 0..=TIME2WAIT_MAX_S.into())?.max(self.options.time2wait_s).to_string()
            }
            // A session ends with its last connection.
            "DefaultTime2Retain" => minimum(value, 0, 0..=3600)?.to_string(),
            "MaxOutstandingR2T" => {
                parameters.r2ts_max = minimum(value, R2TS_MAX, 1..=65535)?;
                parameters.r2ts_max.to_string()
            }
            // Data out of order is not supported, and "Yes" on one side is enough.
            "DataPDUInOrder" | "DataSequenceInOrder" => boolean(value).map(|_| yes_no(true))?,
            "ErrorRecoveryLevel" => minimum(value, 0, 0..=2)?.to_string(),
            "iSCSIProtocolLevel" => minimum(value, 1, 0..=31)?.to_string(),
            "TaskReporting" => {
                let is_offered = value.split(',').any(|one| one == "RFC3720");
                if is_offered { "RFC3720".to_string() } else { REJECT.to_string() }
            }
            "InitiatorAlias" => return Ok(None),
            // Markers are obsolete (RFC 7143, section 13.25).
            "IFMarker" | "OFMarker" => yes_no(false),
            "IFMarkInt" | "OFMarkInt" => IRRELEVANT.to_string(),
            _ => NOT_UNDERSTOOD.to_string(),
        };
        Ok(Some(answer))
    }

    /// Declares the target's own parameters, once.
    pub(crate) fn declare(&mut self, out: &mut TextWriter) {
        if !std::mem::replace(&mut self.has_declared, true) {
            out.push("MaxRecvDataSegmentLength", &RECEIVE_DATA_MAX.to_string());
        }
    }

    /// The result of the login.
    pub(crate) fn finish(&self) -> Parameters {
        let mut parameters = self.parameters;
        parameters.first_burst_bytes_max =
            parameters.first_burst_bytes_max.min(parameters.burst_bytes_max).min(FIRST_BURST_BYTES_MAX);
        parameters.burst_bytes_max = parameters.burst_bytes_max.min(BURST_BYTES_MAX);
        parameters
    }

    /// Whether the digests that the target node requires are in force.
    pub(crate) fn has_required_digests(&self) -> bool {
        (self.parameters.header_digest || !self.digests.header_required)
            && (self.parameters.data_digest || !self.digests.data_required)
    }
}

/// The value is no value of the key.
struct InvalidValue;

/// Whether a key concerns commands and their data alone.
fn is_of_full_feature(key: &str) -> bool {
    matches!(
        key,
        "MaxConnections"
            | "InitialR2T"
            | "ImmediateData"
            | "MaxBurstLength"
            | "FirstBurstLength"
            | "MaxOutstandingR2T"
            | "DataPDUInOrder"
            | "DataSequenceInOrder"
    )
}

/// Whether a key applies to the whole session, so that only its first connection negotiates it (RFC 7143, section 13:
/// "LO", leading only).
fn is_of_session(key: &str) -> bool {
    is_of_full_feature(key)
        || matches!(
            key,
            "DefaultTime2Wait"
                | "DefaultTime2Retain"
                | "ErrorRecoveryLevel"
                | "TaskReporting"
                | "iSCSIProtocolLevel"
        )
}

/// The initiator's first choice that is possible.
fn digest(value: &str, is_required: bool, selected: &mut bool) -> Result<String, InvalidValue> {
    let mut choices = value.split(',');
    let choice = choices.find(|choice| *choice == "CRC32C" || (*choice == "None" && !is_required));
    let choice = choice.ok_or(InvalidValue)?;
    *selected = choice == "CRC32C";
    Ok(choice.to_string())
}

fn number(value: &str, range: std::ops::RangeInclusive<u64>) -> Result<u32, InvalidValue> {
    let number = text::number(value).ok().filter(|number| range.contains(number));
    number.and_then(|number| u32::try_from(number).ok()).ok_or(InvalidValue)
}

fn minimum(value: &str, ours: u32, range: std::ops::RangeInclusive<u64>) -> Result<u32, InvalidValue> {
    Ok(number(value, range)?.min(ours))
}

fn boolean(value: &str) -> Result<bool, InvalidValue> {
    text::boolean(value).map_err(|_| InvalidValue)
}

fn yes_no(value: bool) -> String {
    if value { "Yes" } else { "No" }.to_string()
}

#[cfg(test)]
mod tests {
    use wire_iscsi::TextKeys;

    use super::*;

    fn answers(negotiation: &mut Negotiation, keys: &[(&str, &str)]) -> Vec<(String, String)> {
        let mut out = TextWriter::default();
        for (key, value) in keys {
            negotiation.offer(key, value, &mut out).unwrap();
        }
        let pairs = TextKeys::new(out.bytes()).map(|pair| pair.unwrap());
        pairs.map(|(key, value)| (key.to_string(), value.to_string())).collect()
    }

    #[test]
    fn each_key_has_its_result_function() {
        let mut negotiation = Negotiation { connections_max: 4, ..Negotiation::default() };
        for (key, offered, answer) in [
            ("HeaderDigest", "CRC32C,None", "CRC32C"),
            ("DataDigest", "SHA9,None", "None"),
            ("MaxConnections", "8", "4"),
            ("InitialR2T", "No", "No"),
            ("ImmediateData", "Yes", "Yes"),
            ("MaxBurstLength", "0x40000", "262144"),
            ("FirstBurstLength", "16777215", "65536"),
            ("DefaultTime2Wait", "0", "2"),
            ("DefaultTime2Retain", "20", "0"),
            ("MaxOutstandingR2T", "16", "4"),
            ("DataPDUInOrder", "No", "Yes"),
            ("DataSequenceInOrder", "Yes", "Yes"),
            ("ErrorRecoveryLevel", "2", "0"),
            ("TaskReporting", "FastAbort,RFC3720", "RFC3720"),
            ("iSCSIProtocolLevel", "2", "1"),
            ("OFMarker", "No", "No"),
            ("X-com.example", "1", "NotUnderstood"),
        ] {
            let got = answers(&mut negotiation, &[(key, offered)]);
            assert_eq!(got, [(key.to_string(), answer.to_string())], "{key}={offered}");
        }
        assert_eq!(answers(&mut negotiation, &[("MaxRecvDataSegmentLength", "131072")]), []);
        let expected = Parameters {
            header_digest: true,
            data_digest: false,
            initial_r2t: false,
            immediate_data: true,
            send_data_max: 131072,
            burst_bytes_max: 262144,
            first_burst_bytes_max: 65536,
            r2ts_max: 4,
            connections_max: 4,
        };
        assert_eq!(negotiation.finish(), expected);
    }

    #[test]
    fn the_wait_before_a_reconnection_is_the_longer_of_both_sides() {
        for (offered, answer) in [("0", "5"), ("7", "7"), ("3601", "Reject")] {
            let options = OptionPolicy { time2wait_s: 5, ..OptionPolicy::default() };
            let mut negotiation = Negotiation { options, ..Negotiation::default() };
            assert_eq!(answers(&mut negotiation, &[("DefaultTime2Wait", offered)])[0].1, answer, "{offered}");
        }
    }

    #[test]
    fn invalid_values_are_rejected_and_a_second_offer_ends_the_login() {
        let mut negotiation = Negotiation::default();
        for (key, value) in [
            ("MaxBurstLength", "511"),
            ("MaxOutstandingR2T", "0"),
            ("InitialR2T", "maybe"),
            ("HeaderDigest", "MD5"),
            ("ErrorRecoveryLevel", "-1"),
        ] {
            assert_eq!(answers(&mut negotiation, &[(key, value)])[0].1, "Reject", "{key}={value}");
        }
        let mut out = TextWriter::default();
        assert_eq!(negotiation.offer("MaxBurstLength", "1024", &mut out), Err(LoginStatus::InitiatorError));
        let declared = negotiation.offer("MaxRecvDataSegmentLength", "0", &mut out);
        assert_eq!(declared, Err(LoginStatus::InitiatorError));
    }

    #[test]
    fn the_first_burst_is_not_longer_than_a_burst() {
        let mut negotiation = Negotiation::default();
        answers(&mut negotiation, &[("MaxBurstLength", "4096"), ("FirstBurstLength", "65536")]);
        assert_eq!(negotiation.finish().first_burst_bytes_max, 4096);
    }

    #[test]
    fn a_required_digest_cannot_be_declined() {
        let digests = DigestPolicy { header_required: true, data_required: false };
        let mut negotiation = Negotiation { digests, ..Negotiation::default() };
        assert!(!negotiation.has_required_digests());
        assert_eq!(answers(&mut negotiation, &[("HeaderDigest", "None,CRC32C")])[0].1, "CRC32C");
        assert!(negotiation.has_required_digests());
    }

    #[test]
    fn a_connection_that_joins_a_session_keeps_its_parameters() {
        let session = Parameters { burst_bytes_max: 4096, connections_max: 2, ..Parameters::default() };
        let mut negotiation = Negotiation { is_joining: true, connections_max: 2, ..Negotiation::default() };
        let offers = [("MaxBurstLength", "8192"), ("MaxConnections", "1"), ("HeaderDigest", "CRC32C")];
        let got = answers(&mut negotiation, &offers).into_iter().map(|(_, value)| value);
        assert_eq!(got.collect::<Vec<_>>(), ["Reject", "Reject", "CRC32C"]);
        let expected = Parameters { header_digest: true, ..session };
        assert_eq!(negotiation.finish().with_session(&session), expected);
    }

    #[test]
    fn a_discovery_session_has_no_data() {
        let mut negotiation = Negotiation { is_discovery: true, ..Negotiation::default() };
        let got = answers(&mut negotiation, &[("MaxBurstLength", "4096"), ("HeaderDigest", "None")]);
        assert_eq!((got[0].1.as_str(), got[1].1.as_str()), ("Irrelevant", "None"));
    }
}
