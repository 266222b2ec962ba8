//! The file or pipe of a stream, on a thread of its own: a core does not wait for it.

use std::io::{self, Read};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use wire_store::{DiffDecoder, DiffHeader, DiffItem};

use super::DiffError;

/// Jobs that wait for a file: each is awaited before the next one.
const JOBS_MAX: usize = 2;

type Job<T> = Box<dyn FnOnce(&mut T) + Send>;

/// What a job has returned, and who waits for that.
struct JobAnswer<R> {
    result: Option<R>,
    waker: Option<Waker>,
    is_gone: bool,
}

/// Wakes who waits for a job that did not return.
struct JobAnswerGuard<R>(Arc<Mutex<JobAnswer<R>>>);

impl<R> JobAnswerGuard<R> {
    fn put(&self, result: Option<R>) {
        let mut answer = sync::lock(&self.0);
        answer.is_gone = result.is_none() && answer.result.is_none();
        if result.is_some() {
            answer.result = result;
        }
        let waker = answer.waker.take();
        drop(answer);
        waker.into_iter().for_each(Waker::wake);
    }
}

impl<R> Drop for JobAnswerGuard<R> {
    fn drop(&mut self) {
        self.put(None);
    }
}

/// A thread that has a file. It ends with this.
pub(super) struct FileThread<T> {
    jobs: SyncSender<Job<T>>,
}

impl<T: Send + 'static> FileThread<T> {
    pub(super) fn new(mut file: T) -> io::Result<FileThread<T>> {
        let (jobs, receiver) = sync_channel::<Job<T>>(JOBS_MAX);
        reactor::blocking::spawn_worker("diff stream", receiver, move |job| job(&mut file))?;
        Ok(FileThread { jobs })
    }

    /// Does something with the file. One at a time.
    pub(super) async fn run<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut T) -> R + Send + 'static,
    ) -> io::Result<R> {
        let answer = Arc::new(Mutex::new(JobAnswer { result: None, waker: None, is_gone: false }));
        let guard = JobAnswerGuard(answer.clone());
        let job: Job<T> = Box::new(move |file| {
            let result = job(file);
            guard.put(Some(result));
        });
        let is_gone = || io::Error::other("its thread has ended");
        self.jobs.try_send(job).map_err(|_| is_gone())?;
        std::future::poll_fn(|context| {
            let mut answer = sync::lock(&answer);
            match answer.result.take() {
                Some(result) => Poll::Ready(Ok(result)),
                None if answer.is_gone => Poll::Ready(Err(is_gone())),
                None => {
                    answer.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

/// What a stream has next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum DiffPiece {
    Header(Box<DiffHeader>),
    Data { offset: u64, data: Vec<u8> },
    Zeroes { offset: u64, length: u64 },
    End,
}

/// Reads a stream.
pub(super) struct DiffReader<R> {
    file: R,
    decoder: DiffDecoder,
}

impl<R: Read> DiffReader<R> {
    pub(super) fn new(file: R) -> DiffReader<R> {
        DiffReader { file, decoder: DiffDecoder::new() }
    }

    /// The next piece. Nothing may follow the last one.
    pub(super) fn next(&mut self) -> Result<DiffPiece, DiffError> {
        loop {
            let at = self.decoder.whole_bytes();
            let mut bytes = vec![0; self.decoder.needs()];
            self.file.read_exact(&mut bytes).map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => DiffError::Truncated { at },
                _ => DiffError::Stream(error),
            })?;
            let damaged = |source| DiffError::Damaged { at, source };
            match self.decoder.take(&bytes).map_err(damaged)? {
                None => {}
                Some(DiffItem::Header(header)) => return Ok(DiffPiece::Header(header)),
                Some(DiffItem::Zeroes { offset, length }) => return Ok(DiffPiece::Zeroes { offset, length }),
                Some(DiffItem::Data { offset, .. }) => return Ok(DiffPiece::Data { offset, data: bytes }),
                Some(DiffItem::End) => break,
            }
        }
        let at = self.decoder.whole_bytes();
        match self.file.read(&mut [0])? {
            0 => Ok(DiffPiece::End),
            _ => match self.decoder.take(&[]) {
                Err(source) => Err(DiffError::Damaged { at, source }),
                Ok(_) => Err(DiffError::Truncated { at }),
            },
        }
    }
}

/// Where a stream goes on. The default is its begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiffPosition {
    /// Bytes of the stream that are there.
    pub stream_bytes: u64,
    /// Records that are there.
    pub records: u64,
    /// What the image has before this offset is in the stream, in bytes.
    pub offset: u64,
}

/// An export that was interrupted: the begin of its stream, and where it goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartedDiff {
    /// The header.
    pub header: DiffHeader,
    /// Behind the last record that is whole. The end of the stream does not count.
    pub position: DiffPosition,
}

/// Reads what an interrupted export has written. `None` if it has no header that is whole.
///
/// # Errors
/// [`DiffError::Stream`] if it cannot be read.
pub fn read_started(file: impl Read) -> Result<Option<StartedDiff>, DiffError> {
    let mut reader = DiffReader::new(file);
    let header = match reader.next() {
        Ok(DiffPiece::Header(header)) => *header,
        Err(error @ DiffError::Stream(_)) => return Err(error),
        _ => return Ok(None),
    };
    loop {
        let position = DiffPosition {
            stream_bytes: reader.decoder.whole_bytes(),
            records: reader.decoder.records(),
            offset: reader.decoder.end_offset(),
        };
        match reader.next() {
            Ok(DiffPiece::Data { .. } | DiffPiece::Zeroes { .. }) => {}
            Err(error @ DiffError::Stream(_)) => return Err(error),
            // What a crash has left behind the last whole record is written again.
            Ok(DiffPiece::Header(_) | DiffPiece::End) | Err(_) => {
                return Ok(Some(StartedDiff { header, position }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_panics_is_an_error_for_who_waits() {
        let thread = FileThread::new(1_u32).unwrap();
        let added = reactor::blocking::block_on(thread.run(|value| {
            *value += 1;
            *value
        }));
        assert_eq!(added.unwrap().unwrap(), 2);
        let gone = reactor::blocking::block_on(thread.run(|_| -> u32 { panic!("of the test") }));
        assert!(gone.unwrap().unwrap_err().to_string().contains("its thread has ended"));
        let gone = reactor::blocking::block_on(thread.run(|value| *value)).unwrap();
        assert!(gone.unwrap_err().to_string().contains("its thread has ended"));
    }
}
