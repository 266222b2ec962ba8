//! The handshake: options of the client, and the answers.

use std::sync::Arc;

use target_shell::ReceiveBuffer;
use wire_nbd::{
    BASE_ALLOCATION, ClientFlags, EXPORT_ZEROES, HandshakeFlags, HeaderForm, Info, InfoKind, InfoRequest,
    MetaContextRequest, NbdGreeting, OptionCode, OptionHeader, OptionReplyHeader, OptionReplyKind,
};

use crate::export::{Export, NbdConfig};
use crate::failure::NbdViolation;
use crate::limits::{OPTION_BYTES_MAX, OPTIONS_MAX, SKIPPED_OPTION_MAX, UNSENT_OPTIONS_MAX};

/// The identifier of `base:allocation`.
pub(crate) const ALLOCATION_ID: u32 = 1;

/// What was negotiated so far.
pub(crate) struct Handshake {
    pub(crate) portid: u16,
    pub(crate) form: HeaderForm,
    pub(crate) structured: bool,
    /// Name of the export for which `base:allocation` was selected.
    context_of: Option<String>,
    has_flags: bool,
    no_zeroes: bool,
    options: u32,
    /// Bytes of an option's data to skip.
    skip: u32,
    /// Answers have to be sent before the next option is read.
    blocked: bool,
    /// The options are those of a client whose TLS is established.
    secure: bool,
}

/// How the handshake continues.
pub(crate) enum Negotiated {
    /// More bytes are needed.
    Incomplete,
    /// The answers have to be sent first.
    Blocked,
    /// The client ended it.
    Aborted,
    /// TLS begins once the answers are sent.
    StartTls,
    /// The transmission phase begins.
    Export(Arc<Export>),
}

/// The greeting of the server.
pub(crate) fn greeting() -> [u8; NbdGreeting::SIZE] {
    NbdGreeting { flags: HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES }.to_bytes()
}

impl Handshake {
    pub(crate) fn new(portid: u16) -> Handshake {
        Handshake {
            portid,
            form: HeaderForm::Compact,
            structured: false,
            context_of: None,
            has_flags: false,
            no_zeroes: false,
            options: 0,
            skip: 0,
            blocked: false,
            secure: false,
        }
    }

    /// The handshake after that of TLS: what was negotiated before is forgotten.
    fn begin_tls(&mut self) {
        let Handshake { portid, has_flags, no_zeroes, options, .. } = *self;
        let blocked = true;
        *self = Handshake { has_flags, no_zeroes, options, blocked, secure: true, ..Handshake::new(portid) };
    }

    /// The answers that it waited for are sent.
    pub(crate) fn unblock(&mut self) {
        self.blocked = false;
    }

    /// The export of a name, if the client may have it.
    fn find<'a>(&self, config: &'a NbdConfig, name: &str) -> Result<&'a Arc<Export>, OptionReplyKind> {
        let export = config.find(self.portid, name).ok_or(OptionReplyKind::ErrUnknown)?;
        if export.requires_tls && !self.secure { Err(OptionReplyKind::ErrTlsReqd) } else { Ok(export) }
    }

    /// Whether `base:allocation` was selected for the export.
    pub(crate) fn selects_allocation(&self, export: &Export) -> bool {
        self.context_of.as_deref() == Some(export.name.as_str())
    }

    /// Whether the answers have to be sent before the handshake continues.
    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// Handles what was received; answers are appended to `out`.
    pub(crate) fn advance(
        &mut self,
        inbound: &mut ReceiveBuffer,
        config: &NbdConfig,
        out: &mut Vec<u8>,
    ) -> Result<Negotiated, NbdViolation> {
        if !self.has_flags {
            let Some(bytes) = inbound.filled().first_chunk() else { return Ok(Negotiated::Incomplete) };
            self.no_zeroes = ClientFlags::decode(*bytes)?.contains(ClientFlags::NO_ZEROES);
            self.has_flags = true;
            inbound.consume(ClientFlags::SIZE);
        }
        loop {
            let skipped = inbound.filled().len().min(self.skip as usize);
            inbound.consume(skipped);
            self.skip -= skipped as u32;
            self.blocked = out.len() > UNSENT_OPTIONS_MAX;
            if self.blocked {
                return Ok(Negotiated::Blocked);
            }
            let Some((header, rest)) = inbound.filled().split_first_chunk() else {
                return Ok(Negotiated::Incomplete);
            };
            let header = OptionHeader::decode(header)?;
            if header.length > OPTION_BYTES_MAX {
                self.reject_long(header, out)?;
                inbound.consume(OptionHeader::SIZE);
                continue;
            }
            let Some(data) = rest.get(..header.length as usize) else {
                inbound.reserve(OptionHeader::SIZE + header.length as usize);
                return Ok(Negotiated::Incomplete);
            };
            self.count()?;
            let negotiated = self.option(header, data, config, out)?;
            inbound.consume(OptionHeader::SIZE + header.length as usize);
            // Who adds to what a client sends must not have its bytes taken for those after TLS.
            if matches!(negotiated, Some(Negotiated::StartTls)) && !inbound.filled().is_empty() {
                return Err(NbdViolation::BytesBeforeTls);
            }
            if let Some(negotiated) = negotiated {
                return Ok(negotiated);
            }
        }
    }

    fn count(&mut self) -> Result<(), NbdViolation> {
        self.options += 1;
        if self.options > OPTIONS_MAX { Err(NbdViolation::TooManyOptions(OPTIONS_MAX)) } else { Ok(()) }
    }

    fn reject_long(&mut self, header: OptionHeader, out: &mut Vec<u8>) -> Result<(), NbdViolation> {
        if header.length > SKIPPED_OPTION_MAX || header.option == OptionCode::ExportName as u32 {
            return Err(NbdViolation::OptionLength(header.length));
        }
        self.count()?;
        self.skip = header.length;
        let known = OptionCode::from_number(header.option).is_some();
        let kind = if known { OptionReplyKind::ErrTooBig } else { OptionReplyKind::ErrUnsup };
        answer(out, header, kind, b"the option is too long");
        Ok(())
    }

    fn option(
        &mut self,
        header: OptionHeader,
        data: &[u8],
        config: &NbdConfig,
        out: &mut Vec<u8>,
    ) -> Result<Option<Negotiated>, NbdViolation> {
        let invalid = |out: &mut Vec<u8>, reason: &str| {
            answer(out, header, OptionReplyKind::ErrInvalid, reason.as_bytes());
        };
        let Some(code) = OptionCode::from_number(header.option) else {
            answer(out, header, OptionReplyKind::ErrUnsup, b"the option is unknown");
            return Ok(None);
        };
        match code {
            OptionCode::ExportName => return self.export_name(data, config, out).map(Some),
            OptionCode::Abort => {
                answer(out, header, OptionReplyKind::Ack, b"");
                return Ok(Some(Negotiated::Aborted));
            }
            OptionCode::Info | OptionCode::Go => return Ok(self.info(header, code, data, config, out)),
            OptionCode::ListMetaContext | OptionCode::SetMetaContext => {
                self.contexts(header, code, data, config, out);
            }
            _ if !data.is_empty() => invalid(out, "the option has no data"),
            OptionCode::List => {
                for export in config.of_port(self.portid).filter(|export| self.secure || !export.requires_tls)
                {
                    let mut entry = (export.name.len() as u32).to_be_bytes().to_vec();
                    entry.extend(export.name.as_bytes());
                    entry.extend(export.description.as_bytes());
                    answer(out, header, OptionReplyKind::Server, &entry);
                }
                answer(out, header, OptionReplyKind::Ack, b"");
            }
            OptionCode::StartTls if self.secure => invalid(out, "TLS is established"),
            OptionCode::StartTls if config.tls.is_none() => {
                answer(out, header, OptionReplyKind::ErrPolicy, b"TLS is not configured");
            }
            OptionCode::StartTls => {
                answer(out, header, OptionReplyKind::Ack, b"");
                self.begin_tls();
                return Ok(Some(Negotiated::StartTls));
            }
            OptionCode::StructuredReply if self.form == HeaderForm::Extended => {
                invalid(out, "extended headers include structured replies");
            }
            OptionCode::StructuredReply => {
                self.structured = true;
                answer(out, header, OptionReplyKind::Ack, b"");
            }
            OptionCode::ExtendedHeaders => {
                self.structured = true;
                self.form = HeaderForm::Extended;
                answer(out, header, OptionReplyKind::Ack, b"");
            }
        }
        Ok(None)
    }

    fn export_name(
        &self,
        data: &[u8],
        config: &NbdConfig,
        out: &mut Vec<u8>,
    ) -> Result<Negotiated, NbdViolation> {
        let name = std::str::from_utf8(data).map_err(|_| NbdViolation::NoExport)?;
        let export = self.find(config, name).map_err(|kind| match kind {
            OptionReplyKind::ErrTlsReqd => NbdViolation::TlsRequired,
            _ => NbdViolation::NoExport,
        })?;
        out.extend(export.reply(self.structured).to_bytes());
        if !self.no_zeroes {
            out.extend([0; EXPORT_ZEROES]);
        }
        Ok(Negotiated::Export(export.clone()))
    }

    fn info(
        &self,
        header: OptionHeader,
        code: OptionCode,
        data: &[u8],
        config: &NbdConfig,
        out: &mut Vec<u8>,
    ) -> Option<Negotiated> {
        let Ok(request) = InfoRequest::decode(data) else {
            answer(out, header, OptionReplyKind::ErrInvalid, b"the request is malformed");
            return None;
        };
        let export = match self.find(config, request.name) {
            Ok(export) => export,
            Err(kind) => {
                answer(out, header, kind, reason_of(kind));
                return None;
            }
        };
        let mut infos = vec![Info::Export(export.reply(self.structured))];
        if request.asks(InfoKind::Name) {
            infos.push(Info::Name(&export.name));
        }
        if request.asks(InfoKind::Description) {
            infos.push(Info::Description(&export.description));
        }
        if request.asks(InfoKind::BlockSize) {
            infos.push(export.block_sizes());
        }
        for info in infos {
            let mut data = Vec::new();
            info.encode(&mut data);
            answer(out, header, OptionReplyKind::Info, &data);
        }
        answer(out, header, OptionReplyKind::Ack, b"");
        (code == OptionCode::Go).then(|| Negotiated::Export(export.clone()))
    }

    fn contexts(
        &mut self,
        header: OptionHeader,
        code: OptionCode,
        data: &[u8],
        config: &NbdConfig,
        out: &mut Vec<u8>,
    ) {
        let sets = code == OptionCode::SetMetaContext;
        if sets {
            // Even a failure replaces the previous selection.
            self.context_of = None;
        }
        if !self.structured {
            return answer(out, header, OptionReplyKind::ErrInvalid, b"structured replies come first");
        }
        let Ok(request) = MetaContextRequest::decode(data) else {
            return answer(out, header, OptionReplyKind::ErrInvalid, b"the request is malformed");
        };
        let export = match self.find(config, request.name) {
            Ok(export) => export,
            Err(kind) => return answer(out, header, kind, reason_of(kind)),
        };
        let found = request.queries().any(|query| query == BASE_ALLOCATION || (!sets && query == "base:"));
        if found || (!sets && request.count == 0) {
            let id = if sets { ALLOCATION_ID } else { 0 };
            let mut entry = id.to_be_bytes().to_vec();
            entry.extend(BASE_ALLOCATION.as_bytes());
            answer(out, header, OptionReplyKind::MetaContext, &entry);
            if sets {
                self.context_of = Some(export.name.clone());
            }
        }
        answer(out, header, OptionReplyKind::Ack, b"");
    }
}

/// Why a client does not get an export.
fn reason_of(kind: OptionReplyKind) -> &'static [u8] {
    match kind {
        OptionReplyKind::ErrTlsReqd => b"the export is for clients with TLS",
        _ => b"there is no such export",
    }
}

fn answer(out: &mut Vec<u8>, option: OptionHeader, kind: OptionReplyKind, data: &[u8]) {
    let header = OptionReplyHeader { option: option.option, kind, length: data.len() as u32 };
    out.extend(header.to_bytes());
    out.extend(data);
}
