//! The login phase (RFC 7143, section 6.3).

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use sockets::StreamAddress;
use target_shell::PduData;
use wire_iscsi::{
    BasicHeader, LoginRequest, LoginResponse, LoginStage, LoginStatus, Opcode, TextKeys, TextWriter,
};

use crate::chap::{AuthPolicy, ChapExchange, ChapKeys, NotAuthentic};
use crate::config::{IscsiConfig, IscsiOptions, TargetNode};
use crate::failure::IscsiViolation;
use crate::limits::{LOGIN_REQUESTS_MAX, QUEUE_DEPTH_DEFAULT, TEXT_BYTES_MAX};
use crate::parameters::{Negotiation, OptionPolicy, Parameters};
use crate::pdu_writer::PduWriter;
use crate::sessions::{SessionEntry, SessionHandle, SessionKey, Sessions};

/// A login: one request and one response at a time.
///
/// The first request names the initiator and, unless it is for discovery, the target node. Each answer is one
/// response; the last one waits in [`final_response`](Self::final_response) until the session is entered, and
/// has its identifier.
#[derive(Debug)]
pub(crate) struct Login {
    portid: u16,
    peer: IpAddr,
    stage: LoginStage,
    identity: Option<Identity>,
    negotiation: Negotiation,
    /// Where the initiator is sent.
    redirect: Option<SocketAddr>,
    auth: AuthPolicy,
    chap: Option<ChapExchange>,
    /// Text of requests that continue.
    text: Vec<u8>,
    requests: u32,
    stat_sn: u32,
    final_response: Option<(LoginResponse, Vec<u8>)>,
}

/// Who logs in, and where.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) initiator: String,
    pub(crate) isid: [u8; 6],
    pub(crate) cid: u16,
    /// `None` for discovery.
    pub(crate) node: Option<Arc<TargetNode>>,
    /// The portal group.
    pub(crate) tag: u16,
    /// The session that the connection joins; `None` for a new one.
    pub(crate) joins: Option<u16>,
    /// Commands of a new session in flight.
    queue_depth: u32,
}

impl Identity {
    /// Initiator port and target port; `None` for discovery.
    fn key(&self) -> Option<SessionKey> {
        self.node.as_ref().map(|node| SessionKey {
            initiator: self.initiator.clone(),
            isid: self.isid,
            node: node.id,
            tag: self.tag,
        })
    }
}

/// A login that has succeeded.
#[derive(Debug)]
pub(crate) struct LoginResult {
    pub(crate) identity: Identity,
    pub(crate) parameters: Parameters,
    /// The number of the next response.
    pub(crate) stat_sn: u32,
}

impl Login {
    pub(crate) fn new(portid: u16, peer: &StreamAddress) -> Login {
        Login {
            portid,
            peer: peer.tcp().map_or(IpAddr::from([0; 4]), |address| address.ip().to_canonical()),
            stage: LoginStage::Security,
            identity: None,
            negotiation: Negotiation::default(),
            redirect: None,
            auth: AuthPolicy::default(),
            chap: None,
            text: Vec::new(),
            requests: 0,
            stat_sn: 0,
            final_response: None,
        }
    }

    /// Whether the login has succeeded and the session can be entered.
    pub(crate) fn is_complete(&self) -> bool {
        self.final_response.is_some()
    }

    /// The stage that the initiator is in.
    pub(crate) fn stage(&self) -> LoginStage {
        self.stage
    }

    /// Who logs in, once it is known.
    pub(crate) fn identity(&self) -> Option<&Identity> {
        self.identity.as_ref()
    }

    /// What a complete login enters a session with.
    pub(crate) fn entry(&self, options: &IscsiOptions) -> Option<SessionEntry> {
        let (identity, (response, _)) = (self.identity.as_ref()?, self.final_response.as_ref()?);
        Some(SessionEntry {
            key: identity.key(),
            joins: identity.joins,
            cid: identity.cid,
            parameters: self.negotiation.finish(),
            cmd_sn: response.exp_cmd_sn,
            depth: identity.queue_depth,
            sessions_max: options.sessions_max,
        })
    }

    /// Handles a login request.
    ///
    /// # Errors
    /// The connection is to be closed, after the response.
    pub(crate) fn receive(
        &mut self,
        header: &[u8],
        data: &[u8],
        config: &IscsiConfig,
        sessions: &Sessions,
        out: &mut PduWriter,
    ) -> Result<(), IscsiViolation> {
        if BasicHeader::decode(header)?.opcode != Opcode::LoginRequest || self.is_complete() {
            return Err(IscsiViolation::NoLogin);
        }
        let request = LoginRequest::decode(header)?;
        if self.requests == 0 {
            self.stat_sn = request.exp_stat_sn;
        }
        self.requests += 1;
        self.answer(&request, data, config, sessions, out).map_err(|status| {
            let mut text = TextWriter::default();
            if let Some(address) = self.redirect {
                text.push("TargetAddress", &address.to_string());
            }
            self.respond(&request, false, LoginStage::Security, status, text.bytes(), out);
            IscsiViolation::LoginFailed(status)
        })
    }

    /// Answers a request, unless the login is complete by it.
    fn answer(
        &mut self,
        request: &LoginRequest,
        data: &[u8],
        config: &IscsiConfig,
        sessions: &Sessions,
        out: &mut PduWriter,
    ) -> Result<(), LoginStatus> {
        if self.requests > LOGIN_REQUESTS_MAX || self.text.len() + data.len() > TEXT_BYTES_MAX {
            return Err(LoginStatus::InitiatorError);
        }
        if request.version_min > 0 {
            return Err(LoginStatus::UnsupportedVersion);
        }
        let stage = LoginStage::try_from(request.current_stage).map_err(|_| LoginStatus::InvalidRequest)?;
        let is_first = self.identity.is_none() && self.text.is_empty();
        if stage == LoginStage::FullFeature || (!is_first && stage != self.stage) {
            return Err(LoginStatus::InvalidRequest);
        }
        self.stage = stage;
        self.text.extend_from_slice(data);
        if request.is_continued {
            if request.transit {
                return Err(LoginStatus::InvalidRequest);
            }
            self.respond(request, false, stage, LoginStatus::Success, &[], out);
            return Ok(());
        }
        let text = std::mem::take(&mut self.text);
        let mut keys = Vec::new();
        for pair in TextKeys::new(&text) {
            keys.push(pair.map_err(|_| LoginStatus::InitiatorError)?);
        }
        let mut answers = TextWriter::default();
        if self.identity.is_none() {
            self.identify(request, &keys, config, &mut answers)?;
            let key = self.identity.as_ref().and_then(Identity::key);
            if request.tsih != 0 && !key.is_some_and(|key| sessions.has(request.tsih, &key)) {
                return Err(LoginStatus::NoSession);
            }
        }
        self.negotiate(&keys, config, &mut answers)?;
        // An initiator that offers the next stage while it is challenged stays in this one.
        let is_challenged = self.chap.as_ref().is_some_and(|chap| !chap.is_authentic());
        let next = if request.transit && !is_challenged {
            Some(self.next_stage(request, &mut answers)?)
        } else {
            None
        };
        match next {
            Some(LoginStage::FullFeature) => {
                let response = self.response(request, true, LoginStage::FullFeature, LoginStatus::Success);
                self.final_response = Some((response, answers.into_bytes()));
            }
            Some(next) => {
                self.respond(request, true, next, LoginStatus::Success, answers.bytes(), out);
                self.stage = next;
            }
            None => self.respond(request, false, stage, LoginStatus::Success, answers.bytes(), out),
        }
        Ok(())
    }

    /// Reads the keys that the first request has.
    fn identify(
        &mut self,
        request: &LoginRequest,
        keys: &[(&str, &str)],
        config: &IscsiConfig,
        answers: &mut TextWriter,
    ) -> Result<(), LoginStatus> {
        let value = |name: &str| keys.iter().find(|(key, _)| *key == name).map(|(_, value)| *value);
        let initiator = value("InitiatorName").ok_or(LoginStatus::MissingParameter)?;
        let is_name = !initiator.is_empty()
            && initiator.len() <= wire_iscsi::text::NAME_BYTES_MAX
            && !initiator.contains(char::is_control);
        if !is_name {
            return Err(LoginStatus::InitiatorError);
        }
        let group = config.portal_group(self.portid).ok_or(LoginStatus::TargetRemoved)?;
        let node = match value("SessionType").unwrap_or("Normal") {
            "Discovery" => None,
            "Normal" => {
                let name = value("TargetName").ok_or(LoginStatus::MissingParameter)?;
                let node = config.node(name).ok_or(LoginStatus::NotFound)?;
                if !node.maps.iter().any(|(tag, _)| *tag == group.tag) {
                    return Err(LoginStatus::NotFound);
                }
                if !config.admits(node, group.tag, initiator, self.peer) {
                    return Err(LoginStatus::Forbidden);
                }
                let redirect = node.redirects.iter().find(|(tag, _)| *tag == group.tag);
                if let Some((_, address)) = redirect {
                    self.redirect = Some(*address);
                    return Err(LoginStatus::MovedTemporarily);
                }
                Some(node.clone())
            }
            _ => return Err(LoginStatus::UnsupportedSessionType),
        };
        self.auth = match &node {
            Some(node) => node.auth,
            None => group.discovery_auth.unwrap_or(config.discovery_auth),
        };
        self.negotiation.is_discovery = node.is_none();
        self.negotiation.is_joining = request.tsih != 0;
        self.negotiation.connections_max = config.options.connections_max;
        self.negotiation.options = OptionPolicy {
            immediate_data: config.options.immediate_data,
            first_burst_bytes_max: config.options.first_burst_bytes,
            time2wait_s: config.options.time2wait_s,
        };
        if let Some(node) = &node {
            self.negotiation.digests = node.digests;
            if !node.alias.is_empty() {
                answers.push("TargetAlias", &node.alias);
            }
            answers.push("TargetPortalGroupTag", &group.tag.to_string());
        }
        let queue_depth = node.as_ref().map_or(QUEUE_DEPTH_DEFAULT, |node| node.queue_depth);
        self.identity = Some(Identity {
            initiator: initiator.to_string(),
            isid: request.isid,
            cid: request.cid,
            node,
            tag: group.tag,
            joins: (request.tsih != 0).then_some(request.tsih),
            queue_depth: queue_depth.clamp(1, config.options.queue_depth_max),
        });
        Ok(())
    }

    fn negotiate(
        &mut self,
        keys: &[(&str, &str)],
        config: &IscsiConfig,
        answers: &mut TextWriter,
    ) -> Result<(), LoginStatus> {
        let mut chap_keys = ChapKeys::default();
        for (key, value) in keys {
            match *key {
                "InitiatorName" | "TargetName" | "SessionType" => {}
                "AuthMethod" => answers.push(key, self.select_method(value, config)?),
                _ if self.chap.is_some() && chap_keys.take(key, value) => {}
                _ => self.negotiation.offer(key, value, answers)?,
            }
        }
        match &mut self.chap {
            Some(chap) if self.stage == LoginStage::Security => {
                chap.advance(&chap_keys, answers).map_err(|NotAuthentic| LoginStatus::AuthenticationFailed)
            }
            _ => Ok(()),
        }
    }

    /// The initiator's first choice that is possible.
    fn select_method(&mut self, offered: &str, config: &IscsiConfig) -> Result<&'static str, LoginStatus> {
        let AuthPolicy { disabled, required, mutual, group } = self.auth;
        let selected = offered.split(',').find_map(|method| match method {
            "CHAP" if !disabled && group != 0 => Some("CHAP"),
            "None" if disabled || !required => Some("None"),
            _ => None,
        });
        let selected = selected.ok_or(LoginStatus::AuthenticationFailed)?;
        if selected == "CHAP" {
            self.chap = Some(ChapExchange::new(config.credentials(self.auth), mutual));
        }
        Ok(selected)
    }

    /// Whether the initiator has done what the policy wants.
    fn is_authenticated(&self) -> bool {
        let is_authentic = self.chap.as_ref().is_some_and(ChapExchange::is_authentic);
        is_authentic || self.auth.disabled || !self.auth.required
    }

    /// The stage that follows.
    fn next_stage(
        &mut self,
        request: &LoginRequest,
        answers: &mut TextWriter,
    ) -> Result<LoginStage, LoginStatus> {
        let next = LoginStage::try_from(request.next_stage).map_err(|_| LoginStatus::InvalidRequest)?;
        if next <= self.stage {
            return Err(LoginStatus::InvalidRequest);
        }
        if !self.is_authenticated() {
            return Err(LoginStatus::AuthenticationFailed);
        }
        if self.stage == LoginStage::Operational {
            self.negotiation.declare(answers);
        }
        if next == LoginStage::FullFeature && !self.negotiation.has_required_digests() {
            return Err(LoginStatus::InitiatorError);
        }
        Ok(next)
    }

    fn response(
        &mut self,
        request: &LoginRequest,
        transit: bool,
        next: LoginStage,
        status: LoginStatus,
    ) -> LoginResponse {
        let response = LoginResponse {
            initiator_task_tag: request.initiator_task_tag,
            transit,
            current_stage: request.current_stage,
            next_stage: if transit { next as u8 } else { 0 },
            isid: request.isid,
            tsih: request.tsih,
            stat_sn: self.stat_sn,
            exp_cmd_sn: request.cmd_sn,
            max_cmd_sn: request.cmd_sn,
            status: status.into(),
            ..LoginResponse::default()
        };
        self.stat_sn = self.stat_sn.wrapping_add(1);
        response
    }

    fn respond(
        &mut self,
        request: &LoginRequest,
        transit: bool,
        next: LoginStage,
        status: LoginStatus,
        text: &[u8],
        out: &mut PduWriter,
    ) {
        let response = self.response(request, transit, next, status);
        push(response, text.to_vec(), out);
    }

    /// Sends the last response: the session is entered, or cannot be.
    ///
    /// # Errors
    /// The session cannot be entered, for this reason.
    pub(crate) fn finish(
        &mut self,
        entered: Result<&SessionHandle, LoginStatus>,
        out: &mut PduWriter,
    ) -> Result<LoginResult, IscsiViolation> {
        let (Some((mut response, text)), Some(identity)) = (self.final_response.take(), self.identity.take())
        else {
            return Err(IscsiViolation::NoLogin);
        };
        match entered {
            Ok(handle) => {
                let shared = handle.shared();
                response.tsih = handle.tsih();
                response.exp_cmd_sn = shared.numbers.expected();
                response.max_cmd_sn = shared.numbers.max();
                push(response, text, out);
                let parameters = self.negotiation.finish().with_session(&shared.parameters);
                Ok(LoginResult { identity, parameters, stat_sn: self.stat_sn })
            }
            Err(status) => {
                (response.transit, response.next_stage, response.status) = (false, 0, status.into());
                push(response, Vec::new(), out);
                Err(IscsiViolation::LoginFailed(status))
            }
        }
    }
}

/// Login PDUs have at most 8,192 bytes of data (RFC 7143, section 13.12), and the answers to a request are
/// far fewer.
fn push(mut response: LoginResponse, text: Vec<u8>, out: &mut PduWriter) {
    response.data_length = text.len() as u32;
    out.push(&response.to_bytes(), PduData::Bytes(text));
}
