//! Flushes lines of the processors' caches, so that what was stored is in memory: durable if the memory is persistent.

/// How this processor flushes lines from user space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheFlush {
    instruction: FlushInstruction,
    line_bytes: usize,
}

/// From the best one to that which every processor of the architecture has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "instructions of another architecture"))]
enum FlushInstruction {
    /// Writes the line back, and may keep it in the cache.
    Clwb,
    /// Writes the line back and invalidates it, in any order with other lines.
    Clflushopt,
    /// As `Clflushopt`, one line after the other.
    Clflush,
}

impl CacheFlush {
    /// What this processor has; `None` where user space cannot flush to the point of persistence.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn detect() -> Option<CacheFlush> {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        // Intel SDM, volume 2, CPUID: EBX of leaf 1 has the line size in 8 bytes (bits 15 to 8), EBX of leaf 7 has
        // CLFLUSHOPT (bit 23) and CLWB (bit 24).
        let line_bytes = (__cpuid(1).ebx >> 8 & 0xff) as usize * 8;
        let features = if __cpuid(0).eax >= 7 { __cpuid_count(7, 0).ebx } else { 0 };
        let instruction = match features {
            features if features >> 24 & 1 == 1 => FlushInstruction::Clwb,
            features if features >> 23 & 1 == 1 => FlushInstruction::Clflushopt,
            _ => FlushInstruction::Clflush,
        };
        line_bytes.is_power_of_two().then_some(CacheFlush { instruction, line_bytes })
    }

    /// What this processor has; `None` where user space cannot flush to the point of persistence.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn detect() -> Option<CacheFlush> {
        None
    }

    /// Name of the instruction, for people.
    pub(crate) fn name(self) -> &'static str {
        match self.instruction {
            FlushInstruction::Clwb => "clwb",
            FlushInstruction::Clflushopt => "clflushopt",
            FlushInstruction::Clflush => "clflush",
        }
    }

    /// Begins to write back every line of a range; [`fence`](Self::fence) ends it.
    ///
    /// # Safety
    /// The range must be mapped.
    #[inline]
    pub(crate) unsafe fn flush(self, start: *const u8, bytes: usize) {
        for line in lines(start.addr(), bytes, self.line_bytes) {
            #[cfg(test)]
            recorded::push(recorded::Flushed::Line(line));
            // SAFETY: the line has a byte of the range, which is mapped, so that its page is.
            unsafe { self.flush_line(start.with_addr(line)) };
        }
    }

    /// # Safety
    /// The line must be mapped.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[inline]
    unsafe fn flush_line(self, line: *const u8) {
        // Not `nomem`: what was stored before must not be moved behind it.
        match self.instruction {
            // SAFETY: a mapped line, as the caller promises, and an instruction that the processor has.
            FlushInstruction::Clwb => unsafe {
                std::arch::asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags));
            },
            // SAFETY: as above.
            FlushInstruction::Clflushopt => unsafe {
                std::arch::asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags));
            },
            // SAFETY: as above.
            FlushInstruction::Clflush => unsafe {
                std::arch::asm!("clflush [{}]", in(reg) line, options(nostack, preserves_flags));
            },
        }
    }

    /// # Safety
    /// None here: nothing is flushed. No processor of another architecture is detected, and Miri has no caches.
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    unsafe fn flush_line(self, _line: *const u8) {}

    /// Waits until the lines that this thread flushed are written back.
    #[inline]
    pub(crate) fn fence(self) {
        #[cfg(test)]
        recorded::push(recorded::Flushed::Fence);
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: orders stores and flushes, and accesses nothing.
        unsafe {
            std::arch::asm!("sfence", options(nostack, preserves_flags));
        }
    }
}

/// The addresses of the lines that have a byte of a range.
fn lines(start: usize, bytes: usize, line_bytes: usize) -> impl Iterator<Item = usize> {
    let first = start & !(line_bytes - 1);
    let end = if bytes == 0 { first } else { start + bytes };
    (first..end).step_by(line_bytes)
}

/// What this thread flushed: nothing else shows a flush where memory is not persistent.
#[cfg(test)]
pub(crate) mod recorded {
    use std::cell::RefCell;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Flushed {
        Line(usize),
        Fence,
    }

    thread_local!(static FLUSHED: RefCell<Vec<Flushed>> = const { RefCell::new(Vec::new()) });

    pub(super) fn push(flushed: Flushed) {
        FLUSHED.with_borrow_mut(|all| all.push(flushed));
    }

    /// Since the last call.
    pub(crate) fn take() -> Vec<Flushed> {
        FLUSHED.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_a_range_is_flushed_once() {
        for (start, bytes, expected) in [
            (0, 0, vec![]),
            (70, 0, vec![]),
            (64, 64, vec![64]),
            (64, 65, vec![64, 128]),
            (127, 1, vec![64]),
            (127, 2, vec![64, 128]),
            (100, 100, vec![64, 128, 192]),
        ] {
            assert_eq!(lines(start, bytes, 64).collect::<Vec<_>>(), expected, "{bytes} at {start}");
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    #[cfg_attr(miri, ignore = "Miri's processor has no line size")]
    fn every_processor_of_this_architecture_can_flush() {
        let flush = CacheFlush::detect().unwrap();
        let data = [7_u8; 200];
        // Each instruction that it has.
        let all = [FlushInstruction::Clwb, FlushInstruction::Clflushopt, FlushInstruction::Clflush];
        let first = all.iter().position(|it| *it == flush.instruction).unwrap();
        for instruction in all.into_iter().skip(first) {
            // A processor with CLWB has CLFLUSHOPT, too.
            // SAFETY: the array is mapped.
            unsafe { CacheFlush { instruction, ..flush }.flush(data.as_ptr(), data.len()) };
            flush.fence();
        }
        assert_eq!(data, [7; 200]);
    }
}
