//! Completions of device requests become the rest of their command, and its reply.

use block_io::Payload;

use super::*;

impl Session {
    /// A device request has completed.
    #[inline]
    pub(crate) fn complete(&mut self, tag: u64, completion: bdev::Completion, out: &mut SendQueue) {
        self.outstanding -= 1;
        let role = Role::ALL[(tag >> 8 & 0xff) as usize];
        let Some(slot) = self.commands.slot_at((tag & 0xff) as u32) else { return };
        if role.tag(slot).0 != tag {
            return;
        }
        match role {
            Role::Piece => self.piece_done(slot, completion, out),
            Role::Hole => self.hole_done(slot, &completion, out),
            Role::Scan => self.scan_done(slot, &completion, out),
            Role::EdgeRead(index) => self.edge_read(slot, index, completion, out),
            Role::EdgeCompare(index) => self.edge_compared(slot, index, completion, out),
            Role::EdgeWrite(index) => self.edge_written(slot, index, completion, out),
        }
    }

    #[inline]
    fn piece_done(&mut self, slot: Slot, completion: bdev::Completion, out: &mut SendQueue) {
        let Some(command) = self.commands.get_mut(slot) else { return };
        let status = completion.status();
        if !status.is_success() {
            command.fail(error_of(status));
        }
        let mut request = completion.into_request();
        let data = request.take_data();
        if command.command == NbdCommand::Read
            && command.error.is_none()
            && let Some(data) = data
        {
            let first = request.lba * u64::from(self.export.block_size);
            return self.data_read(slot, data, first, out);
        }
        self.memory.remove(data.as_ref().map_or(0, Data::len));
        self.end_piece(slot, out);
    }

    /// Queues the data of a read, which begins at byte `first` of the device.
    fn data_read(&mut self, slot: Slot, data: Data, first: u64, out: &mut SendQueue) {
        let Some(command) = self.commands.get_mut(slot) else { return };
        command.pending -= 1;
        let is_last = command.issued && command.pending == 0;
        let begin = command.offset.max(first);
        let end = (command.offset + command.length).min(first + data.len() as u64);
        let (from, to) = ((begin - first) as usize, (end - first) as usize);
        let cookie = command.cookie;
        let reply = if self.structured {
            let flags = if is_last { ChunkFlags::DONE } else { ChunkFlags::empty() };
            let (kind, length) = (ChunkKind::OffsetData, 8 + end - begin);
            let chunk = ChunkHeader { flags, kind, cookie, offset: command.offset, length };
            let form = self.form;
            OutgoingPdu::new(|head| {
                let size = chunk.encode(form, head);
                head[size..size + 8].copy_from_slice(&begin.to_be_bytes());
                size + 8
            })
        } else {
            OutgoingPdu::new(|head| SimpleReply { error: 0, cookie }.encode(head))
        };
        out.push(reply.with_data(PduData::Buffer(data, from, to)));
        if is_last {
            self.commands.remove(slot);
        }
    }

    /// A piece has ended without data for the client.
    pub(super) fn end_piece(&mut self, slot: Slot, out: &mut SendQueue) {
        if let Some(command) = self.commands.get_mut(slot) {
            command.pending -= 1;
        }
        self.finish(slot, out);
    }

    /// Answers a command of which nothing is pending.
    pub(super) fn finish(&mut self, slot: Slot, out: &mut SendQueue) {
        let is_done = |command: &CommandState| command.issued && command.pending == 0;
        if !self.commands.get(slot).is_some_and(is_done) {
            return;
        }
        let Some(command) = self.commands.remove(slot) else { return };
        if let Some(scan) = command.scan {
            if command.error.is_none() {
                return self.send_extents(command.cookie, command.offset, *scan, out);
            }
            self.memory.remove(Scan::BUFFER_BYTES);
        }
        self.reply(command.cookie, command.offset, Some(command.command), command.error, out);
    }

    /// The search for data before a read has ended.
    fn hole_done(&mut self, slot: Slot, completion: &bdev::Completion, out: &mut SendQueue) {
        let request = completion.request();
        let is_hole = completion.status().is_success() && matches!(request.payload, Payload::Found(None));
        if !is_hole {
            // A failed search is not the read's failure.
            let read = Retry::Read { lba: request.lba, blocks: request.blocks };
            return self.retries.push_back((slot, read));
        }
        let Some(command) = self.commands.get_mut(slot) else { return };
        let block_size = u64::from(self.export.block_size);
        let first = request.lba * block_size;
        let begin = command.offset.max(first);
        let end = (command.offset + command.length).min(first + u64::from(request.blocks) * block_size);
        command.pending -= 1;
        let is_last = command.issued && command.pending == 0 && command.error.is_none();
        let flags = if is_last { ChunkFlags::DONE } else { ChunkFlags::empty() };
        let (cookie, offset, form) = (command.cookie, command.offset, self.form);
        let chunk = ChunkHeader { flags, kind: ChunkKind::OffsetHole, cookie, offset, length: 12 };
        out.push(OutgoingPdu::new(|head| {
            let size = chunk.encode(form, head);
            head[size..size + 8].copy_from_slice(&begin.to_be_bytes());
            head[size + 8..size + 12].copy_from_slice(&((end - begin) as u32).to_be_bytes());
            size + 12
        }));
        if is_last {
            self.commands.remove(slot);
        } else {
            self.finish(slot, out);
        }
    }

    pub(super) fn read_again(
        &mut self,
        slot: Slot,
        lba: u64,
        blocks: u32,
        out: &mut SendQueue,
        context: &mut IoContext<'_, NbdCore>,
    ) -> Result<(), NoMemory> {
        let bytes = blocks as usize * self.export.block_size as usize;
        let data = self.take(bytes, context)?;
        self.submit(slot, bdev::Request::read(Role::Piece.tag(slot), lba, blocks, data), out, context);
        Ok(())
    }
}
