//! Text requests: discovery, and parameters that may change (RFC 7143, sections 11.10 and 11.11).

use std::net::{IpAddr, SocketAddr};

use target_shell::PduData;
use wire_iscsi::text::{self, NOT_UNDERSTOOD, REJECT};
use wire_iscsi::{HEADER_BYTES, RESERVED_TAG, RejectReason, TextKeys, TextRequest, TextResponse, TextWriter};

use super::Session;
use crate::config::{IscsiConfig, Portal};
use crate::failure::IscsiViolation;
use crate::limits::TEXT_BYTES_MAX;
use crate::pdu_writer::PduWriter;

/// A text request in several PDUs, and its answer in several PDUs.
#[derive(Debug, Default)]
pub(super) struct TextExchange {
    received: Vec<u8>,
    unsent: Vec<u8>,
    /// A complete request waits for the configuration.
    request: Option<TextRequest>,
}

/// The target's name of an exchange that continues.
const TRANSFER_TAG: u32 = 1;

impl Session {
    /// Receives a text request.
    pub(super) fn text_request(
        &mut self,
        header: &[u8; HEADER_BYTES],
        data: &[u8],
        out: &mut PduWriter,
    ) -> Result<(), IscsiViolation> {
        let request = TextRequest::decode(header)?;
        if !self.admit(request.immediate, request.cmd_sn)? {
            return Ok(());
        }
        if !request.immediate {
            self.widen_window();
        }
        if request.target_transfer_tag == RESERVED_TAG {
            // It begins a negotiation, and resets an earlier one.
            self.text = TextExchange::default();
        } else if request.target_transfer_tag != TRANSFER_TAG {
            self.reject(header, RejectReason::ProtocolError, out);
            return Ok(());
        }
        if !self.text.unsent.is_empty() {
            self.send_text(&request, out);
            return Ok(());
        }
        if self.text.received.len() + data.len() > TEXT_BYTES_MAX {
            self.reject(header, RejectReason::ProtocolError, out);
            self.text = TextExchange::default();
            return Ok(());
        }
        self.text.received.extend_from_slice(data);
        if request.is_continued {
            self.text_response(&request, Vec::new(), TRANSFER_TAG, out);
        } else {
            self.text.request = Some(request);
        }
        Ok(())
    }

    /// Answers a complete text request. `local` is the address that the initiator has connected to, `peer` its own.
    pub(crate) fn answer_text(
        &mut self,
        config: &IscsiConfig,
        local: Option<SocketAddr>,
        peer: IpAddr,
        out: &mut PduWriter,
    ) {
        let Some(request) = self.text.request.take() else { return };
        let received = std::mem::take(&mut self.text.received);
        let mut answers = TextWriter::default();
        for pair in TextKeys::new(&received) {
            let Ok((key, value)) = pair else {
                return self.reject(&request.to_bytes(), RejectReason::ProtocolError, out);
            };
            match key {
                "SendTargets" => self.list_targets(value, config, local, peer, &mut answers),
                "MaxRecvDataSegmentLength" => match text::number(value) {
                    Ok(bytes @ 512..=0xff_ffff) => self.parameters.send_data_max = bytes as u32,
                    _ => answers.push(key, REJECT),
                },
                _ => answers.push(key, NOT_UNDERSTOOD),
            }
        }
        self.text.unsent = answers.into_bytes();
        self.send_text(&request, out);
    }

    /// SendTargets (RFC 7143, appendix C).
    fn list_targets(
        &self,
        which: &str,
        config: &IscsiConfig,
        local: Option<SocketAddr>,
        peer: IpAddr,
        answers: &mut TextWriter,
    ) {
        let own = self.identity.node.as_ref().map(|node| node.name.as_str());
        let wanted = match (which, own) {
            // All is for discovery alone, and what a normal session asks without a name is about its own target.
            ("All", Some(_)) => return answers.push("SendTargets", REJECT),
            ("All", None) => None,
            ("", own) => own,
            (name, _) => Some(name),
        };
        let initiator = &self.identity.initiator;
        for node in config.nodes.iter().filter(|node| wanted.is_none_or(|name| name == node.name)) {
            let mut groups = config.visible_groups(node, initiator, peer).peekable();
            if groups.peek().is_none() {
                continue;
            }
            answers.push("TargetName", &node.name);
            for group in groups {
                for portal in &group.portals {
                    let address = reachable(portal, local);
                    answers.push("TargetAddress", &format!("{address},{}", group.tag));
                }
            }
        }
    }

    /// Sends as much of an answer as a PDU carries.
    fn send_text(&mut self, request: &TextRequest, out: &mut PduWriter) {
        let count = self.text.unsent.len().min(self.parameters.send_data_max as usize);
        let rest = self.text.unsent.split_off(count);
        let part = std::mem::replace(&mut self.text.unsent, rest);
        let tag = if self.text.unsent.is_empty() { RESERVED_TAG } else { TRANSFER_TAG };
        self.text_response(request, part, tag, out);
    }

    fn text_response(&mut self, request: &TextRequest, data: Vec<u8>, tag: u32, out: &mut PduWriter) {
        let has_more = !self.text.unsent.is_empty();
        let response = TextResponse {
            data_length: data.len() as u32,
            initiator_task_tag: request.initiator_task_tag,
            is_final: tag == RESERVED_TAG && request.is_final,
            is_continued: has_more,
            lun: request.lun,
            target_transfer_tag: if request.is_final || has_more { tag } else { TRANSFER_TAG },
            stat_sn: self.next_stat_sn(),
            exp_cmd_sn: self.exp_cmd_sn(),
            max_cmd_sn: self.max_cmd_sn(),
        };
        out.push(&response.to_bytes(), PduData::Bytes(data));
    }
}

/// The address of a portal for an initiator that has reached `local`: a portal on all addresses is reached there.
fn reachable(portal: &Portal, local: Option<SocketAddr>) -> SocketAddr {
    match local {
        Some(local) if portal.address.ip().is_unspecified() => {
            SocketAddr::new(local.ip().to_canonical(), portal.address.port())
        }
        _ => portal.address,
    }
}
