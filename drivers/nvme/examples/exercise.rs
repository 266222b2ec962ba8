//! Executes every NVMe command on a namespace and checks its effect: `exercise URI --yes-destroy-data`.
//!
//! Prints a line for each: `NAME ok`, or `NAME not offered` if the controller does not support the command.
//! A namespace that is not attached is attached for the duration of the run.
//! Exits with status 1 at the first failure.

use block_io::{Status, Tag};
use dma::Buffer;
use nvme::protection::{self, Tags};
use nvme::{AdminData, Command, CommandCompletion, Controller, NamespaceInfo, ProtectionType, QueuePair};
use wire_nvme::admin::Identify;
use wire_nvme::identify::{Cns, Csi, IdentifyNamespace, oacs, oncs};
use wire_nvme::io::{
    CopyCommand, CopyRange, DatasetManagement, DsmRange, Prinfo, ReadWrite, WriteUncorrectable, WriteZeroes,
};
use wire_nvme::manage::{FormatNvm, NewNamespace, SecureErase};
use wire_nvme::reservation::{
    AcquireAction, PersistChange, RegisterAction, ReleaseAction, ReservationAcquire, ReservationRegister,
    ReservationRelease, ReservationStatus, ReservationType, encode_keys,
};
use wire_nvme::zone::{
    REPORT_HEADER_SIZE, ReportFilter, ZONE_SIZE, ZoneAction, ZoneAppend, ZoneDescriptor,
    ZoneManagementReceive, ZoneManagementSend, ZoneState,
};

pub(crate) type ExerciseResult = Result<(), Box<dyn std::error::Error>>;

/// Unallocated capacity that the namespace management test needs, in bytes.
const SPARE_BYTES: u128 = 1 << 18;
/// Blocks of each read and write.
const BLOCKS: u32 = 8;

fn main() -> ExerciseResult {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [uri, consent] = &arguments[..] else {
        return Err("usage: exercise URI --yes-destroy-data".into());
    };
    if consent != "--yes-destroy-data" {
        return Err("this overwrites the namespace: add --yes-destroy-data".into());
    }
    exercise(&uri.parse()?)
}

/// Executes every command that the controller supports on one namespace, and destroys its data.
pub(crate) async fn exercise_attached(
    core: reactor::Core,
    controller: Controller,
    nsid: u32,
) -> ExerciseResult {
    let info = controller.namespace(nsid).await?;
    let pair = controller.qpair(&core, &nvme::Options::default()).await?;
    println!(
        "# {} blocks of {} + {} bytes, shadow doorbells: {}",
        info.blocks,
        info.block_size,
        info.metadata.bytes,
        controller.has_shadow_doorbells()
    );
    Exercise { info, pair, controller, core }.every_command().await
}

/// Executes every command on the namespace that a URI names; attaches the namespace meanwhile if it is not
/// attached.
pub(crate) fn exercise(uri: &nvme::Uri) -> ExerciseResult {
    let uri = uri.clone();
    let arena = dma::Arena::new(dma::ArenaConfig { shared: true, ..Default::default() });
    let reactor = reactor::Reactor::new(&reactor::ReactorConfig { arena, ..Default::default() })?;
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
            expect_equal("attached", controller.active_namespaces().await?.contains(&nsid), false)?;
            report("attach", true);
            report("detach", true);
        }
        Ok(())
    })
}

/// A namespace under test.
struct Exercise {
    core: reactor::Core,
    controller: Controller,
    pair: QueuePair,
    info: NamespaceInfo,
}

/// Fails with a message about `what` unless both values are equal.
fn expect_equal<T: PartialEq + std::fmt::Debug>(what: &str, found: T, expected: T) -> ExerciseResult {
    if found == expected { Ok(()) } else { Err(format!("{what}: {found:?}, not {expected:?}").into()) }
}

/// Executes each optional command that the controller supports (ONCS), and reports it.
macro_rules! optional {
    ($exercise:ident: $($name:literal $bit:ident $try:ident;)*) => {$(
        let offered = $exercise.info.oncs & oncs::$bit != 0;
        if offered {
            $exercise.$try().await?;
        }
        report($name, offered);
    )*};
}

impl Exercise {
    async fn every_command(&mut self) -> ExerciseResult {
        if self.info.command_set == Csi::Zoned {
            self.zones().await?;
            return Ok(());
        }
        self.write_and_read(0).await?;
        report("write, read", true);
        self.limits().await?;
        report("out of range", true);
        // The optional commands transfer data without metadata, which the controller would reject or check.
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

    async fn optional(&mut self) -> ExerciseResult {
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
        self.expect_success("flush", Command::flush(Tag(0), self.info.nsid)).await?;
        report("flush", true);
        Ok(())
    }

    // Command execution.
    async fn execute(&mut self, mut batch: Vec<Command>) -> Vec<CommandCompletion> {
        let (expected, mut done) = (batch.len(), Vec::new());
        while done.len() < expected {
            self.pair.submit_commands(&mut batch);
            if self.pair.poll_commands(&mut done) == 0 {
                self.core.sleep_ns(20_000).await;
            }
        }
        done.sort_by_key(|executed| executed.tag().0);
        done
    }

    async fn execute_one(&mut self, command: Command) -> CommandCompletion {
        self.execute(vec![command]).await.remove(0)
    }

    async fn expect_success(
        &mut self,
        what: &str,
        command: Command,
    ) -> Result<CommandCompletion, Box<dyn std::error::Error>> {
        let done = self.execute_one(command).await;
        expect_equal(what, done.status(), Status::SUCCESS)?;
        Ok(done)
    }

    async fn expect_status(&mut self, what: &str, command: Command, expected: Status) -> ExerciseResult {
        let status = self.execute_one(command).await.status();
        if status.same_code(expected) {
            Ok(())
        } else {
            Err(format!("{what}: {status}, not {expected}").into())
        }
    }

    // Buffers and common commands.
    fn range(&self, lba: u64) -> ReadWrite {
        ReadWrite { lba, blocks: BLOCKS, ..ReadWrite::default() }
    }

    /// Bytes per block in a data buffer, including the metadata of extended LBAs.
    fn stride(&self) -> usize {
        let metadata = &self.info.metadata;
        self.info.block_size as usize + if metadata.extended { usize::from(metadata.bytes) } else { 0 }
    }

    fn buffer(&self, bytes: usize) -> Buffer {
        self.core.pool().take(bytes).expect("an arena without a limit has memory")
    }

    /// A buffer of `blocks` blocks with a test pattern in which adjacent bytes differ.
    fn filled(&self, blocks: u32, seed: u8) -> Buffer {
        let mut buffer = self.buffer(blocks as usize * self.stride());
        for (at, byte) in buffer.as_mut_slice().iter_mut().enumerate() {
            *byte = (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8) ^ seed;
        }
        buffer
    }

    /// A separate metadata buffer, if the format of the namespace has one.
    fn metadata(&self) -> Option<Buffer> {
        let metadata = &self.info.metadata;
        let separate = metadata.bytes > 0 && !metadata.extended;
        separate.then(|| self.buffer(BLOCKS as usize * usize::from(metadata.bytes)))
    }

    fn write(&self, lba: u64, data: Buffer) -> Command {
        let write = Command::write(Tag(0), self.info.nsid, &self.range(lba), data);
        self.metadata().into_iter().fold(write, Command::with_metadata)
    }

    fn read(&self, lba: u64) -> Command {
        let read = Command::read(Tag(0), self.info.nsid, &self.range(lba), self.filled(BLOCKS, 0xff));
        self.metadata().into_iter().fold(read, Command::with_metadata)
    }

    async fn expect_data(&mut self, what: &str, lba: u64, expected: &[u8]) -> ExerciseResult {
        let read = self.read(lba);
        let done = self.expect_success(what, read).await?;
        let data = done.command().data.as_ref().expect("a read has a buffer");
        let differs = data.as_slice().iter().zip(expected).position(|(found, expected)| found != expected);
        differs.map_or(Ok(()), |at| Err(format!("{what}: byte {at} differs").into()))
    }

    // Tests of single commands.
    async fn write_and_read(&mut self, lba: u64) -> ExerciseResult {
        if self.info.metadata.protection.is_some() {
            return Ok(());
        }
        let data = self.filled(BLOCKS, 1);
        let expected = data.as_slice().to_vec();
        let write = self.write(lba, data);
        self.expect_success("write", write).await?;
        self.expect_data("read", lba, &expected).await
    }

    async fn limits(&mut self) -> ExerciseResult {
        let read = self.read(self.info.blocks - 1);
        self.expect_status("read beyond the end", read, Status::LBA_OUT_OF_RANGE).await
    }

    async fn compare(&mut self) -> ExerciseResult {
        let nsid = self.info.nsid;
        let equal = Command::compare(Tag(0), nsid, &self.range(0), self.filled(BLOCKS, 1));
        self.expect_success("compare of equal data", equal).await?;
        let other = Command::compare(Tag(0), nsid, &self.range(0), self.filled(BLOCKS, 2));
        self.expect_status("compare of different data", other, Status::COMPARE_FAILURE).await
    }

    async fn compare_and_write(&mut self) -> ExerciseResult {
        let (nsid, range, tags) = (self.info.nsid, self.range(0), (Tag(0), Tag(1)));
        for (expected, first, second) in
            [(2, Status::COMPARE_FAILURE, Status::FUSED_FAILED), (1, Status::SUCCESS, Status::SUCCESS)]
        {
            let (expected, data) = (self.filled(BLOCKS, expected), self.filled(BLOCKS, 3));
            let pair = Command::compare_and_write(tags, nsid, &range, expected, data);
            let done = self.execute(pair.into()).await;
            for (executed, expected) in done.iter().zip([first, second]) {
                let status = executed.status();
                if !status.same_code(expected) {
                    return Err(
                        format!("fused command {}: {status}, not {expected}", executed.tag().0).into()
                    );
                }
            }
        }
        let expected = self.filled(BLOCKS, 3);
        self.expect_data("blocks after the fused compare and write", 0, expected.as_slice()).await?;
        self.write_and_read(0).await
    }

    async fn verify(&mut self) -> ExerciseResult {
        self.expect_success("verify", Command::verify(Tag(0), self.info.nsid, &self.range(0))).await?;
        let beyond = self.range(self.info.blocks - 1);
        let beyond = Command::verify(Tag(0), self.info.nsid, &beyond);
        self.expect_status("verify beyond the end", beyond, Status::LBA_OUT_OF_RANGE).await
    }

    async fn write_zeroes(&mut self) -> ExerciseResult {
        self.write_and_read(64).await?;
        let view = WriteZeroes { lba: 64, blocks: BLOCKS, ..WriteZeroes::default() };
        self.expect_success("write zeroes", Command::write_zeroes(Tag(0), self.info.nsid, &view)).await?;
        self.expect_data("zeroes", 64, &vec![0; BLOCKS as usize * self.stride()]).await
    }

    async fn deallocate(&mut self) -> ExerciseResult {
        let mut ranges = self.buffer(16);
        let range = DsmRange { lba: 128, blocks: BLOCKS, attributes: 0 };
        range.encode(ranges.as_mut_slice().first_chunk_mut().expect("16 bytes were taken"));
        let view = DatasetManagement { ranges: 1, deallocate: true, ..DatasetManagement::default() };
        let nsid = self.info.nsid;
        self.expect_success("deallocate", Command::dataset_management(Tag(0), nsid, &view, ranges)).await?;
        self.write_and_read(128).await
    }

    async fn copy(&mut self) -> ExerciseResult {
        self.write_and_read(0).await?;
        let mut ranges = self.buffer(32);
        let source = CopyRange { lba: 0, blocks: BLOCKS, ..CopyRange::default() };
        source.encode(ranges.as_mut_slice().first_chunk_mut().expect("32 bytes were taken"));
        let view = CopyCommand { lba: 256, ranges: 1, ..CopyCommand::default() };
        self.expect_success("copy", Command::copy(Tag(0), self.info.nsid, &view, ranges)).await?;
        let expected = self.filled(BLOCKS, 1);
        self.expect_data("blocks after copy", 256, expected.as_slice()).await
    }

    async fn write_uncorrectable(&mut self) -> ExerciseResult {
        let view = WriteUncorrectable { lba: 512, blocks: BLOCKS };
        let nsid = self.info.nsid;
        self.expect_success("write uncorrectable", Command::write_uncorrectable(Tag(0), nsid, &view)).await?;
        let read = self.read(512);
        self.expect_status("read of uncorrectable blocks", read, Status::UNRECOVERED_READ_ERROR).await?;
        self.write_and_read(512).await
    }

    /// Creates a namespace like this one, attaches, writes, reads, detaches and deletes it.
    async fn namespace_management(&mut self) -> ExerciseResult {
        let view = Identify { cns: Cns::Namespace.to_wire(), ..Identify::default() };
        let page = self.controller.identify(&view, self.info.nsid).await?;
        let this = IdentifyNamespace::decode(page.first_chunk().ok_or("no page")?)?;
        let blocks = SPARE_BYTES as u64 / u64::from(self.info.block_size);
        let new = NewNamespace { nsze: blocks, ncap: blocks, ..NewNamespace::like(&this) };
        let cntlid = self.controller.identity().cntlid;
        let nsid = self.controller.create_namespace(&new, Csi::Nvm).await?;
        expect_equal("active before", self.controller.active_namespaces().await?.contains(&nsid), false)?;
        self.controller.attach_namespace(nsid, &[cntlid], true).await?;
        expect_equal("active", self.controller.active_namespaces().await?.contains(&nsid), true)?;
        let info = self.controller.namespace(nsid).await?;
        expect_equal("blocks", info.blocks, blocks)?;
        let this = std::mem::replace(&mut self.info, info);
        let used = self.write_and_read(0).await;
        self.info = this;
        used?;
        self.controller.attach_namespace(nsid, &[cntlid], false).await?;
        expect_equal("active after", self.controller.active_namespaces().await?.contains(&nsid), false)?;
        self.controller.delete_namespace(nsid).await?;
        Ok(())
    }

    async fn reservations(&mut self) -> ExerciseResult {
        const KEY: u64 = 0x1234;
        let nsid = self.info.nsid;
        let keys = |exercise: &Exercise, current, other| {
            let mut keys = exercise.buffer(16);
            keys.as_mut_slice().copy_from_slice(&encode_keys(current, other));
            keys
        };
        let persist = PersistChange::None;
        let register = ReservationRegister { action: RegisterAction::Register, ignore_key: false, persist };
        let register = Command::reservation_register(Tag(0), nsid, &register, keys(self, 0, KEY));
        self.expect_success("register", register).await?;
        let kind = ReservationType::WriteExclusive;
        let acquire = ReservationAcquire { action: AcquireAction::Acquire, ignore_key: false, kind };
        let acquire = Command::reservation_acquire(Tag(0), nsid, &acquire, keys(self, KEY, 0));
        self.expect_success("acquire", acquire).await?;
        let report = Command::reservation_report(Tag(0), nsid, true, self.buffer(4096));
        let done = self.expect_success("report", report).await?;
        let data = done.command().data.as_ref().expect("a report has a buffer");
        let found = ReservationStatus::decode(data.as_slice(), true)?;
        expect_equal("type", found.kind, Some(kind))?;
        expect_equal("registrants", found.registrants.len(), 1)?;
        expect_equal("holder", (found.registrants[0].holder, found.registrants[0].key), (true, KEY))?;
        self.write_and_read(0).await?;
        let release = ReservationRelease { action: ReleaseAction::Release, ignore_key: false, kind };
        let mut key = self.buffer(8);
        key.as_mut_slice().copy_from_slice(&KEY.to_le_bytes());
        self.expect_success("release", Command::reservation_release(Tag(0), nsid, &release, key)).await?;
        let unregister =
            ReservationRegister { action: RegisterAction::Unregister, ignore_key: false, persist };
        let unregister = Command::reservation_register(Tag(0), nsid, &unregister, keys(self, KEY, 0));
        self.expect_success("unregister", unregister).await?;
        Ok(())
    }

    /// Metadata and protection information, generated and checked by the host and by the controller.
    async fn protection(&mut self) -> ExerciseResult {
        let format = self.info.metadata;
        let protected = format.protection.is_some();
        if protected {
            self.protected().await?;
        } else {
            let (data, mut separate) = (self.filled(BLOCKS, 5), self.metadata());
            let expected = data.as_slice().to_vec();
            let mut write = Command::write(Tag(0), self.info.nsid, &self.range(0), data);
            if let Some(metadata) = &mut separate {
                metadata.as_mut_slice().fill(0x5a);
                write = write.with_metadata(separate.take().expect("it is there"));
            }
            self.expect_success("write of data and metadata", write).await?;
            let read = self.read(0);
            let done = self.expect_success("read of data and metadata", read).await?;
            let found = done.command();
            expect_equal("data", found.data.as_ref().map(|data| data.as_slice() == expected), Some(true))?;
            if let Some(metadata) = &found.metadata {
                expect_equal("metadata", metadata.as_slice().iter().all(|byte| *byte == 0x5a), true)?;
            }
        }
        report("metadata", true);
        report("protection information", protected);
        Ok(())
    }

    async fn protected(&mut self) -> ExerciseResult {
        let (format, size) = (self.info.metadata, self.info.block_size as usize);
        const LBA: u64 = 16;
        let tags = Tags { reference: LBA, application: 0x1234, application_mask: 0xffff, ..Tags::default() };
        // Check guard and application tag, and the reference tag except for type 3, which forbids it.
        let type3 = format.protection.is_some_and(|protection| protection.kind == ProtectionType::Type3);
        let checked = ReadWrite {
            prinfo: if type3 {
                Prinfo::CHECK_GUARD | Prinfo::CHECK_APPLICATION_TAG
            } else {
                Prinfo::all() - Prinfo::ACTION
            },
            reference_tag: LBA as u32,
            application_tag: tags.application,
            application_tag_mask: tags.application_mask,
            ..self.range(LBA)
        };
        for corrupted in [false, true] {
            let (mut data, mut separate) = (self.filled(BLOCKS, 6), self.metadata());
            match &mut separate {
                Some(metadata) => {
                    protection::generate(&format, size, data.as_slice(), metadata.as_mut_slice(), &tags);
                }
                None => protection::generate_extended(&format, size, data.as_mut_slice(), &tags),
            }
            data.as_mut_slice()[7] ^= u8::from(corrupted);
            let write = Command::write(Tag(0), self.info.nsid, &checked, data);
            let write = separate.into_iter().fold(write, Command::with_metadata);
            if corrupted {
                self.expect_status("write with a wrong guard", write, Status::GUARD_CHECK_ERROR).await?;
            } else {
                self.expect_success("write with protection information", write).await?;
            }
        }
        let read = Command::read(Tag(0), self.info.nsid, &checked, self.filled(BLOCKS, 0xff));
        let read = self.metadata().into_iter().fold(read, Command::with_metadata);
        let done = self.expect_success("read with protection information", read).await?;
        let (data, separate) = (done.command().data.as_ref(), done.command().metadata.as_ref());
        let data = data.expect("a read has a buffer").as_slice();
        let checked = match separate {
            Some(metadata) => protection::check(&format, size, data, metadata.as_slice(), &tags),
            None => protection::check_extended(&format, size, data, &tags),
        };
        expect_equal("protection information", checked, Ok(()))
    }

    async fn format(&mut self) -> ExerciseResult {
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
        expect_equal("blocks after format", formatted.blocks, self.info.blocks)
    }

    async fn report_zones(&mut self) -> Result<Vec<ZoneDescriptor>, Box<dyn std::error::Error>> {
        let data = self.buffer(REPORT_HEADER_SIZE + 4 * ZONE_SIZE);
        let view = ZoneManagementReceive {
            lba: 0,
            length_bytes: data.len() as u64,
            extended: false,
            filter: ReportFilter::All,
            partial: true,
        };
        let done = self
            .expect_success("report zones", Command::zone_report(Tag(0), self.info.nsid, &view, data))
            .await?;
        let data = done.command().data.as_ref().expect("a report has a buffer");
        Ok(ZoneDescriptor::list(data.as_slice())?.1)
    }

    async fn zone(&mut self, zone: u64, action: ZoneAction, state: ZoneState) -> ExerciseResult {
        let view = ZoneManagementSend { zone_lba: zone, action, all: false };
        let send = Command::zone_send(Tag(0), self.info.nsid, &view, None);
        self.expect_success(&format!("{action:?}"), send).await?;
        let zones = self.report_zones().await?;
        let found = zones.iter().find(|one| one.lba == zone).ok_or("a zone is not in the report")?;
        expect_equal(&format!("state after {action:?}"), found.state, state)
    }

    async fn zones(&mut self) -> ExerciseResult {
        let zones = self.report_zones().await?;
        let [first, second, ..] = &zones[..] else {
            return Err(format!("{} zones", zones.len()).into());
        };
        let (first, second) = (first.lba, second.lba);
        self.zone(first, ZoneAction::Reset, ZoneState::Empty).await?;
        report("zone report, zone reset", true);
        for round in 0..3 {
            let view = ZoneAppend { zone_lba: first, blocks: BLOCKS, ..ZoneAppend::default() };
            let append = Command::zone_append(Tag(0), self.info.nsid, &view, self.filled(BLOCKS, round));
            let done = self.expect_success("append", append).await?;
            let at = first + u64::from(round) * u64::from(BLOCKS);
            expect_equal("LBA of the append", done.result(), at)?;
            let expected = self.filled(BLOCKS, round);
            self.expect_data("appended blocks", at, expected.as_slice()).await?;
        }
        report("zone append", true);
        let misplaced =
            Command::write(Tag(0), self.info.nsid, &self.range(second + 8), self.filled(BLOCKS, 0));
        self.expect_status("write beyond the write pointer", misplaced, Status::ZONE_INVALID_WRITE).await?;
        report("write at the write pointer alone", true);
        self.zone(second, ZoneAction::Open, ZoneState::ExplicitlyOpened).await?;
        self.zone(second, ZoneAction::Close, ZoneState::Closed).await?;
        self.zone(first, ZoneAction::Finish, ZoneState::Full).await?;
        self.zone(first, ZoneAction::Reset, ZoneState::Empty).await?;
        report("zone open, close, finish, reset", true);
        // A raw admin command that every controller supports.
        let identify = wire_nvme::Sqe::new(0x06);
        let data =
            self.controller.admin(wire_nvme::Sqe { cdw10: 1, ..identify }, AdminData::In(4096)).await?.data;
        expect_equal("bytes of a raw identify", data.len(), 4096)
    }
}

fn report(name: &str, offered: bool) {
    println!("{name} {}", if offered { "ok" } else { "not offered" });
}
