//! Tries every command on a namespace, and checks what it does: `exercise URI --yes-destroy-data`.
//!
//! Prints a line for each: `NAME ok`, or `NAME not offered` where the controller says that it lacks the command.
//! A namespace that is not attached is attached for that time.
//! Ends with status 1 at the first that does not do what it should.

use memory::Buffer;
use nvme::protection::{self, Tags};
use nvme::{AdminData, Command, Controller, Executed, NamespaceInfo, ProtectionType, QueuePair};
use ring::{Status, Tag};
use wire_nvme::admin::Identify;
use wire_nvme::identify::{Cns, Csi, IdentifyNamespace, oacs, oncs};
use wire_nvme::io::{
    Copy, CopyRange, DatasetManagement, DsmRange, Prinfo, ReadWrite, WriteUncorrectable, WriteZeroes,
};
use wire_nvme::manage::{FormatNvm, NewNamespace, SecureErase};
use wire_nvme::reservation::{
    Acquire, AcquireAction, PersistChange, Register, RegisterAction, Release, ReleaseAction, Reservation,
    ReservationType, encode_keys,
};
use wire_nvme::zone::{
    Append, ManagementReceive, ManagementSend, REPORT_HEADER_SIZE, ReportFilter, ZONE_SIZE, Zone, ZoneAction,
    ZoneState,
};

pub(crate) type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Capacity that a controller must have to spare for another namespace to be made.
const SPARE_BYTES: u128 = 1 << 18;
/// Blocks of each read and write.
const BLOCKS: u32 = 8;

fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [uri, consent] = &arguments[..] else {
        return Err("usage: exercise URI --yes-destroy-data".into());
    };
    if consent != "--yes-destroy-data" {
        return Err("it overwrites the namespace: say --yes-destroy-data".into());
    }
    exercise(&uri.parse()?)
}

/// Tries everything that a controller offers on one of its namespaces, whose data is lost.
pub(crate) async fn exercise_attached(core: reactor::Core, controller: Controller, nsid: u32) -> Outcome {
    let info = controller.namespace(nsid).await?;
    let pair = controller.qpair(&core, &nvme::Options::default()).await?;
    println!(
        "# {} blocks of {} + {} bytes, shadow doorbells: {}",
        info.blocks,
        info.block_size,
        info.metadata.bytes,
        controller.has_shadow_doorbells()
    );
    Run { info, pair, controller, core }.every_command().await
}

/// The same on the namespace that a URI names, which is attached for it where it is not.
pub(crate) fn exercise(uri: &nvme::Uri) -> Outcome {
    let uri = uri.clone();
    let arena = memory::Arena::new(memory::Config { shared: true, ..Default::default() });
    let reactor = reactor::Reactor::new(&reactor::Config { arena, ..Default::default() })?;
    let core = reactor.core();
    reactor.block_on(async move {
        let options = nvme::Options::default();
        let controller = Controller::attach(&core, &uri, &options).await?;
        let nsid = uri.nsid();
        let detached = !controller.active_namespaces().await?.contains(&nsid);
        let cntlid = controller.identity().cntlid;
        if detached {
            controller.attach_namespace(nsid, &[cntlid], true).await?;
        }
        exercise_attached(core, controller.clone(), nsid).await?;
        if detached {
            controller.attach_namespace(nsid, &[cntlid], false).await?;
            same("attached", controller.active_namespaces().await?.contains(&nsid), false)?;
            report("attach", true);
            report("detach", true);
        }
        Ok(())
    })
}

/// A namespace under test.
struct Run {
    core: reactor::Core,
    controller: Controller,
    pair: QueuePair,
    info: NamespaceInfo,
}

/// Fails, with what was compared, unless both are equal.
fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: T, wanted: T) -> Outcome {
    if found == wanted { Ok(()) } else { Err(format!("{what}: {found:?}, not {wanted:?}").into()) }
}

/// For each optional command of the controller (ONCS): tries it, if it is offered.
macro_rules! optional {
    ($run:ident: $($name:literal $bit:ident $try:ident;)*) => {$(
        let offered = $run.info.oncs & oncs::$bit != 0;
        if offered {
            $run.$try().await?;
        }
        report($name, offered);
    )*};
}

impl Run {
    async fn every_command(&mut self) -> Outcome {
        if self.info.command_set == Csi::Zoned {
            self.zones().await?;
            return Ok(());
        }
        self.write_and_read(0).await?;
        report("write, read", true);
        self.limits().await?;
        report("out of range", true);
        // What follows writes and reads whole blocks, whose metadata the controller would want to be right.
        if self.info.metadata.bytes > 0 {
            self.protection().await?;
        } else {
            self.optional().await?;
        }
        let format = self.controller.identity().oacs & oacs::FORMAT != 0;
        if format {
            self.format().await?;
        }
        report("format", format);
        let managed = self.controller.identity().oacs & oacs::NAMESPACE_MANAGEMENT != 0
            && self.controller.identity().unvmcap >= SPARE_BYTES
            && self.info.metadata.bytes == 0;
        if managed {
            self.namespace_management().await?;
        }
        report("namespace management", managed);
        Ok(())
    }

    async fn optional(&mut self) -> Outcome {
        let fused = self.controller.identity().fuses & 1 != 0;
        if fused {
            self.compare_and_write().await?;
        }
        report("fused compare and write", fused);
        optional! {
            self:
            "compare" COMPARE compare;
            "verify" VERIFY verify;
            "write zeroes" WRITE_ZEROES write_zeroes;
            "dataset management" DATASET_MANAGEMENT deallocate;
            "copy" COPY copy;
            "write uncorrectable" WRITE_UNCORRECTABLE write_uncorrectable;
            "reservations" RESERVATIONS reservations;
        }
        self.succeed("flush", Command::flush(Tag(0), self.info.nsid)).await?;
        report("flush", true);
        Ok(())
    }

    // Commands.

    async fn execute(&mut self, mut batch: Vec<Command>) -> Vec<Executed> {
        let (wanted, mut done) = (batch.len(), Vec::new());
        while done.len() < wanted {
            self.pair.submit_commands(&mut batch);
            if self.pair.poll_commands(&mut done) == 0 {
                self.core.sleep_ns(20_000).await;
            }
        }
        done.sort_by_key(|executed| executed.tag().0);
        done
    }

    async fn one(&mut self, command: Command) -> Executed {
        self.execute(vec![command]).await.remove(0)
    }

    async fn succeed(
        &mut self,
        what: &str,
        command: Command,
    ) -> Result<Executed, Box<dyn std::error::Error>> {
        let done = self.one(command).await;
        same(what, done.status(), Status::SUCCESS)?;
        Ok(done)
    }

    async fn fail(&mut self, what: &str, command: Command, wanted: Status) -> Outcome {
        let status = self.one(command).await.status();
        if status.same_code(wanted) { Ok(()) } else { Err(format!("{what}: {status}, not {wanted}").into()) }
    }

    // What they need.

    fn range(&self, lba: u64) -> ReadWrite {
        ReadWrite { lba, blocks: BLOCKS, ..ReadWrite::default() }
    }

    /// Bytes of a block in a buffer: with its metadata, where that is behind its data.
    fn stride(&self) -> usize {
        let metadata = &self.info.metadata;
        self.info.block_size as usize + if metadata.extended { usize::from(metadata.bytes) } else { 0 }
    }

    fn buffer(&self, bytes: usize) -> Buffer {
        self.core.pool().take(bytes).expect("an arena without a limit has memory")
    }

    /// A buffer of so many blocks, in which no two bytes next to each other are the same.
    fn filled(&self, blocks: u32, seed: u8) -> Buffer {
        let mut buffer = self.buffer(blocks as usize * self.stride());
        for (at, byte) in buffer.as_mut_slice().iter_mut().enumerate() {
            *byte = (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8) ^ seed;
        }
        buffer
    }

    /// A buffer for metadata apart from the data, if that is how the namespace has it.
    fn metadata(&self) -> Option<Buffer> {
        let metadata = &self.info.metadata;
        let apart = metadata.bytes > 0 && !metadata.extended;
        apart.then(|| self.buffer(BLOCKS as usize * usize::from(metadata.bytes)))
    }

    fn write(&self, lba: u64, data: Buffer) -> Command {
        let write = Command::write(Tag(0), self.info.nsid, &self.range(lba), data);
        self.metadata().into_iter().fold(write, Command::with_metadata)
    }

    fn read(&self, lba: u64) -> Command {
        let read = Command::read(Tag(0), self.info.nsid, &self.range(lba), self.filled(BLOCKS, 0xff));
        self.metadata().into_iter().fold(read, Command::with_metadata)
    }

    async fn holds(&mut self, what: &str, lba: u64, wanted: &[u8]) -> Outcome {
        let read = self.read(lba);
        let done = self.succeed(what, read).await?;
        let data = done.command().data.as_ref().expect("a read has a buffer");
        let differs = data.as_slice().iter().zip(wanted).position(|(found, wanted)| found != wanted);
        differs.map_or(Ok(()), |at| Err(format!("{what}: byte {at} differs").into()))
    }

    // What they must do.

    async fn write_and_read(&mut self, lba: u64) -> Outcome {
        if self.info.metadata.protection.is_some() {
            return Ok(());
        }
        let data = self.filled(BLOCKS, 1);
        let wanted = data.as_slice().to_vec();
        let write = self.write(lba, data);
        self.succeed("write", write).await?;
        self.holds("read", lba, &wanted).await
    }

    async fn limits(&mut self) -> Outcome {
        let read = self.read(self.info.blocks - 1);
        self.fail("a read over the end", read, Status::LBA_OUT_OF_RANGE).await
    }

    async fn compare(&mut self) -> Outcome {
        let nsid = self.info.nsid;
        let equal = Command::compare(Tag(0), nsid, &self.range(0), self.filled(BLOCKS, 1));
        self.succeed("compare of what is there", equal).await?;
        let other = Command::compare(Tag(0), nsid, &self.range(0), self.filled(BLOCKS, 2));
        self.fail("compare of something else", other, Status::COMPARE_FAILURE).await
    }

    async fn compare_and_write(&mut self) -> Outcome {
        let (nsid, range, tags) = (self.info.nsid, self.range(0), (Tag(0), Tag(1)));
        for (expected, first, second) in
            [(2, Status::COMPARE_FAILURE, Status::FUSED_FAILED), (1, Status::SUCCESS, Status::SUCCESS)]
        {
            let (expected, data) = (self.filled(BLOCKS, expected), self.filled(BLOCKS, 3));
            let pair = Command::compare_and_write(tags, nsid, &range, expected, data);
            let done = self.execute(pair.into()).await;
            for (executed, wanted) in done.iter().zip([first, second]) {
                let status = executed.status();
                if !status.same_code(wanted) {
                    return Err(format!("fused command {}: {status}, not {wanted}", executed.tag().0).into());
                }
            }
        }
        let wanted = self.filled(BLOCKS, 3);
        self.holds("what was compared and written", 0, wanted.as_slice()).await?;
        self.write_and_read(0).await
    }

    async fn verify(&mut self) -> Outcome {
        self.succeed("verify", Command::verify(Tag(0), self.info.nsid, &self.range(0))).await?;
        let beyond = self.range(self.info.blocks - 1);
        let beyond = Command::verify(Tag(0), self.info.nsid, &beyond);
        self.fail("verify over the end", beyond, Status::LBA_OUT_OF_RANGE).await
    }

    async fn write_zeroes(&mut self) -> Outcome {
        self.write_and_read(64).await?;
        let view = WriteZeroes { lba: 64, blocks: BLOCKS, ..WriteZeroes::default() };
        self.succeed("write zeroes", Command::write_zeroes(Tag(0), self.info.nsid, &view)).await?;
        self.holds("zeroes", 64, &vec![0; BLOCKS as usize * self.stride()]).await
    }

    async fn deallocate(&mut self) -> Outcome {
        let mut ranges = self.buffer(16);
        let range = DsmRange { lba: 128, blocks: BLOCKS, attributes: 0 };
        range.encode(ranges.as_mut_slice().first_chunk_mut().expect("16 bytes were taken"));
        let view = DatasetManagement { ranges: 1, deallocate: true, ..DatasetManagement::default() };
        let nsid = self.info.nsid;
        self.succeed("deallocate", Command::dataset_management(Tag(0), nsid, &view, ranges)).await?;
        self.write_and_read(128).await
    }

    async fn copy(&mut self) -> Outcome {
        self.write_and_read(0).await?;
        let mut ranges = self.buffer(32);
        let source = CopyRange { lba: 0, blocks: BLOCKS, ..CopyRange::default() };
        source.encode(ranges.as_mut_slice().first_chunk_mut().expect("32 bytes were taken"));
        let view = Copy { lba: 256, ranges: 1, ..Copy::default() };
        self.succeed("copy", Command::copy(Tag(0), self.info.nsid, &view, ranges)).await?;
        let wanted = self.filled(BLOCKS, 1);
        self.holds("the copy", 256, wanted.as_slice()).await
    }

    async fn write_uncorrectable(&mut self) -> Outcome {
        let view = WriteUncorrectable { lba: 512, blocks: BLOCKS };
        let nsid = self.info.nsid;
        self.succeed("write uncorrectable", Command::write_uncorrectable(Tag(0), nsid, &view)).await?;
        let read = self.read(512);
        self.fail("a read of what was made unreadable", read, Status::UNRECOVERED_READ_ERROR).await?;
        self.write_and_read(512).await
    }

    /// Another namespace, like this one: made, attached, written and read, detached, deleted.
    async fn namespace_management(&mut self) -> Outcome {
        let view = Identify { cns: Cns::Namespace.to_wire(), ..Identify::default() };
        let page = self.controller.identify(&view, self.info.nsid).await?;
        let this = IdentifyNamespace::decode(page.first_chunk().ok_or("no page")?)?;
        let blocks = SPARE_BYTES as u64 / u64::from(self.info.block_size);
        let new = NewNamespace { nsze: blocks, ncap: blocks, ..NewNamespace::like(&this) };
        let cntlid = self.controller.identity().cntlid;
        let nsid = self.controller.create_namespace(&new, Csi::Nvm).await?;
        same("active before", self.controller.active_namespaces().await?.contains(&nsid), false)?;
        self.controller.attach_namespace(nsid, &[cntlid], true).await?;
        same("active", self.controller.active_namespaces().await?.contains(&nsid), true)?;
        let info = self.controller.namespace(nsid).await?;
        same("blocks", info.blocks, blocks)?;
        let this = std::mem::replace(&mut self.info, info);
        let used = self.write_and_read(0).await;
        self.info = this;
        used?;
        self.controller.attach_namespace(nsid, &[cntlid], false).await?;
        same("active after", self.controller.active_namespaces().await?.contains(&nsid), false)?;
        self.controller.delete_namespace(nsid).await?;
        Ok(())
    }

    async fn reservations(&mut self) -> Outcome {
        const KEY: u64 = 0x1234;
        let nsid = self.info.nsid;
        let keys = |run: &Run, current, other| {
            let mut keys = run.buffer(16);
            keys.as_mut_slice().copy_from_slice(&encode_keys(current, other));
            keys
        };
        let persist = PersistChange::None;
        let register = Register { action: RegisterAction::Register, ignore_key: false, persist };
        let register = Command::reservation_register(Tag(0), nsid, &register, keys(self, 0, KEY));
        self.succeed("register", register).await?;
        let kind = ReservationType::WriteExclusive;
        let acquire = Acquire { action: AcquireAction::Acquire, ignore_key: false, kind };
        let acquire = Command::reservation_acquire(Tag(0), nsid, &acquire, keys(self, KEY, 0));
        self.succeed("acquire", acquire).await?;
        let report = Command::reservation_report(Tag(0), nsid, true, self.buffer(4096));
        let done = self.succeed("report", report).await?;
        let data = done.command().data.as_ref().expect("a report has a buffer");
        let found = Reservation::decode(data.as_slice(), true)?;
        same("type", found.kind, Some(kind))?;
        same("registrants", found.registrants.len(), 1)?;
        same("holder", (found.registrants[0].holder, found.registrants[0].key), (true, KEY))?;
        self.write_and_read(0).await?;
        let release = Release { action: ReleaseAction::Release, ignore_key: false, kind };
        let mut key = self.buffer(8);
        key.as_mut_slice().copy_from_slice(&KEY.to_le_bytes());
        self.succeed("release", Command::reservation_release(Tag(0), nsid, &release, key)).await?;
        let unregister = Register { action: RegisterAction::Unregister, ignore_key: false, persist };
        let unregister = Command::reservation_register(Tag(0), nsid, &unregister, keys(self, KEY, 0));
        self.succeed("unregister", unregister).await?;
        Ok(())
    }

    /// Metadata and protection information, made and checked by us and by the controller.
    async fn protection(&mut self) -> Outcome {
        let format = self.info.metadata;
        let protected = format.protection.is_some();
        if protected {
            self.protected().await?;
        } else {
            let (data, mut apart) = (self.filled(BLOCKS, 5), self.metadata());
            let wanted = data.as_slice().to_vec();
            let mut write = Command::write(Tag(0), self.info.nsid, &self.range(0), data);
            if let Some(metadata) = &mut apart {
                metadata.as_mut_slice().fill(0x5a);
                write = write.with_metadata(apart.take().expect("it is there"));
            }
            self.succeed("write of data and metadata", write).await?;
            let read = self.read(0);
            let done = self.succeed("read of data and metadata", read).await?;
            let found = done.command();
            same("data", found.data.as_ref().map(|data| data.as_slice() == wanted), Some(true))?;
            if let Some(metadata) = &found.metadata {
                same("metadata", metadata.as_slice().iter().all(|byte| *byte == 0x5a), true)?;
            }
        }
        report("metadata", true);
        report("protection information", protected);
        Ok(())
    }

    async fn protected(&mut self) -> Outcome {
        let (format, size) = (self.info.metadata, self.info.block_size as usize);
        const LBA: u64 = 16;
        let tags = Tags { reference: LBA as u32, application: 0x1234, application_mask: 0xffff };
        // Guard and application tag, and the reference tag, whose check type 3 forbids.
        let type3 = format.protection.is_some_and(|protection| protection.kind == ProtectionType::Type3);
        let checked = ReadWrite {
            prinfo: Prinfo(if type3 { 0b110 } else { 0b111 }),
            reference_tag: LBA as u32,
            application_tag: tags.application,
            application_tag_mask: tags.application_mask,
            ..self.range(LBA)
        };
        for spoilt in [false, true] {
            let (mut data, mut apart) = (self.filled(BLOCKS, 6), self.metadata());
            match &mut apart {
                Some(metadata) => {
                    protection::generate(&format, size, data.as_slice(), metadata.as_mut_slice(), &tags);
                }
                None => protection::generate_extended(&format, size, data.as_mut_slice(), &tags),
            }
            data.as_mut_slice()[7] ^= u8::from(spoilt);
            let write = Command::write(Tag(0), self.info.nsid, &checked, data);
            let write = apart.into_iter().fold(write, Command::with_metadata);
            if spoilt {
                self.fail("a write with a wrong guard", write, Status::GUARD_CHECK_ERROR).await?;
            } else {
                self.succeed("a write with protection information", write).await?;
            }
        }
        let read = Command::read(Tag(0), self.info.nsid, &checked, self.filled(BLOCKS, 0xff));
        let read = self.metadata().into_iter().fold(read, Command::with_metadata);
        let done = self.succeed("a read with protection information", read).await?;
        let (data, apart) = (done.command().data.as_ref(), done.command().metadata.as_ref());
        let data = data.expect("a read has a buffer").as_slice();
        let checked = match apart {
            Some(metadata) => protection::check(&format, size, data, metadata.as_slice(), &tags),
            None => protection::check_extended(&format, size, data, &tags),
        };
        same("protection information", checked, Ok(()))
    }

    async fn format(&mut self) -> Outcome {
        let now = &self.info.identify;
        let view = FormatNvm {
            format: now.format,
            extended_lba: now.extended_lba,
            protection: now.dps & 7,
            protection_first: now.dps & 8 != 0,
            secure_erase: SecureErase::None,
        };
        self.controller.format(&view, self.info.nsid).await?;
        let formatted = self.controller.namespace(self.info.nsid).await?;
        same("blocks after format", formatted.blocks, self.info.blocks)
    }

    async fn report_zones(&mut self) -> Result<Vec<Zone>, Box<dyn std::error::Error>> {
        let data = self.buffer(REPORT_HEADER_SIZE + 4 * ZONE_SIZE);
        let view = ManagementReceive {
            lba: 0,
            length_bytes: data.len() as u64,
            extended: false,
            filter: ReportFilter::All,
            partial: true,
        };
        let done =
            self.succeed("report zones", Command::zone_report(Tag(0), self.info.nsid, &view, data)).await?;
        let data = done.command().data.as_ref().expect("a report has a buffer");
        Ok(Zone::list(data.as_slice())?.1)
    }

    async fn zone(&mut self, zone: u64, action: ZoneAction, state: ZoneState) -> Outcome {
        let view = ManagementSend { zone_lba: zone, action, all: false };
        let send = Command::zone_send(Tag(0), self.info.nsid, &view, None);
        self.succeed(&format!("{action:?}"), send).await?;
        let zones = self.report_zones().await?;
        let found = zones.iter().find(|one| one.lba == zone).ok_or("a zone is not in the report")?;
        same(&format!("state after {action:?}"), found.state, state)
    }

    async fn zones(&mut self) -> Outcome {
        let zones = self.report_zones().await?;
        let [first, second, ..] = &zones[..] else {
            return Err(format!("{} zones", zones.len()).into());
        };
        let (first, second) = (first.lba, second.lba);
        self.zone(first, ZoneAction::Reset, ZoneState::Empty).await?;
        report("zone report, zone reset", true);
        for round in 0..3 {
            let view = Append { zone_lba: first, blocks: BLOCKS, ..Append::default() };
            let append = Command::zone_append(Tag(0), self.info.nsid, &view, self.filled(BLOCKS, round));
            let done = self.succeed("append", append).await?;
            let at = first + u64::from(round) * u64::from(BLOCKS);
            same("where it was appended", done.result(), at)?;
            let wanted = self.filled(BLOCKS, round);
            self.holds("what was appended", at, wanted.as_slice()).await?;
        }
        report("zone append", true);
        let misplaced =
            Command::write(Tag(0), self.info.nsid, &self.range(second + 8), self.filled(BLOCKS, 0));
        self.fail("a write behind the write pointer", misplaced, Status::ZONE_INVALID_WRITE).await?;
        report("write at the write pointer alone", true);
        self.zone(second, ZoneAction::Open, ZoneState::ExplicitlyOpened).await?;
        self.zone(second, ZoneAction::Close, ZoneState::Closed).await?;
        self.zone(first, ZoneAction::Finish, ZoneState::Full).await?;
        self.zone(first, ZoneAction::Reset, ZoneState::Empty).await?;
        report("zone open, close, finish, reset", true);
        // A raw admin command, which any controller answers.
        let identify = wire_nvme::Sqe::new(0x06);
        let data =
            self.controller.admin(wire_nvme::Sqe { cdw10: 1, ..identify }, AdminData::In(4096)).await?.data;
        same("bytes of a raw identify", data.len(), 4096)
    }
}

fn report(name: &str, offered: bool) {
    println!("{name} {}", if offered { "ok" } else { "not offered" });
}
