//! Registered buffers of one size, and the frames that a queue pair sends from them.
//!
//! Invariant: the device uses a buffer only from when it is posted until its completion, or until its queue pair is
//! destroyed; meanwhile nothing else does.

use super::error::VerbsError;
use super::resources::{Domain, Pair, Registered};
use super::sys::{IbvSendWr, IbvSge, is};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::collections::VecDeque;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Mutex, PoisonError};

/// Registered memory, divided into buffers of one size.
pub(super) struct Buffers {
    registered: Registered,
    pages: Pages,
    size: usize,
}

/// Anonymous memory of whole pages.
struct Pages {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the pages belong to this value alone.
unsafe impl Send for Pages {}

impl Pages {
    fn new(len: usize) -> Result<Pages, VerbsError> {
        // SAFETY: a new mapping at an address that the system chooses.
        let start =
            unsafe { mmap_anonymous(null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
        let start = start.map_err(|errno| VerbsError::Create("map memory for buffers", errno.into()))?;
        let start = NonNull::new(start.cast()).expect("a mapping is not at address 0");
        Ok(Pages { start, len })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is of this value, and the registration of its pages was dropped before.
        let _unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

impl Buffers {
    /// Creates `count` buffers of `size` bytes, which only this process's queue pairs of `domain` reach.
    pub(super) fn new(domain: &Arc<Domain>, count: usize, size: usize) -> Result<Buffers, VerbsError> {
        let pages = Pages::new(count * size)?;
        // SAFETY: the pages stay mapped until `pages` drops, after the registration; they are accessed by the functions
        // below only, for buffers that the device does not use.
        let registered = unsafe {
            let at = pages.start.as_ptr();
            Registered::new(domain, at, pages.len, at as u64, is::ACCESS_LOCAL_WRITE)
        }?;
        Ok(Buffers { registered, pages, size })
    }

    /// Number of buffers.
    pub(super) fn count(&self) -> u32 {
        (self.pages.len / self.size) as u32
    }

    /// Describes `len` bytes of a buffer, from `offset` on, for a request.
    pub(super) fn piece(&self, buffer: u32, offset: usize, len: usize) -> IbvSge {
        let at = self.at(buffer, offset, len);
        IbvSge { addr: at as u64, length: len as u32, lkey: self.registered.lkey() }
    }

    /// Returns the first `len` bytes of a buffer.
    ///
    /// # Safety
    /// The device does not use the buffer as long as the slice is used, and no other slice of it exists.
    #[allow(clippy::mut_from_ref, reason = "the caller makes sure that there is one slice at a time")]
    pub(super) unsafe fn bytes(&self, buffer: u32, len: usize) -> &mut [u8] {
        let at = self.at(buffer, 0, len);
        // SAFETY: the bytes are mapped and were initialized by the system; the caller keeps them exclusive.
        unsafe { std::slice::from_raw_parts_mut(at, len) }
    }

    fn at(&self, buffer: u32, offset: usize, len: usize) -> *mut u8 {
        assert!(
            buffer < self.count() && offset <= self.size && len <= self.size - offset,
            "outside the buffers"
        );
        // SAFETY: within the pages, as just checked.
        unsafe { self.pages.start.as_ptr().add(buffer as usize * self.size + offset) }
    }
}

/// Buffers from which frames are sent, with a list of the free ones.
pub(super) struct Pool {
    pub(super) buffers: Buffers,
    free: Vec<u32>,
    returned: Arc<Returned>,
}

/// Buffers of queue pairs that were destroyed.
type Returned = Mutex<Vec<u32>>;

impl Pool {
    pub(super) fn new(domain: &Arc<Domain>, count: usize, size: usize) -> Result<Pool, VerbsError> {
        let buffers = Buffers::new(domain, count, size)?;
        let free = (0..buffers.count()).rev().collect();
        Ok(Pool { buffers, free, returned: Arc::default() })
    }

    /// Takes a free buffer, if there is one.
    fn take(&mut self) -> Option<u32> {
        if self.free.is_empty() {
            self.free.append(&mut self.returned.lock().unwrap_or_else(PoisonError::into_inner));
        }
        self.free.pop()
    }
}

/// The frames of one queue pair that wait to be sent, or for their completion.
pub(super) struct Sender {
    /// Number of requests that the pair accepts at a time.
    depth: usize,
    /// Frames that wait, oldest first.
    waiting: VecDeque<Frame>,
    /// Number of bytes of waiting frames that have no registered buffer.
    overflow: usize,
    /// The buffer of each posted request, oldest first; `None` for a frame that its request carries itself.
    posted: VecDeque<Option<u32>>,
    /// Number of requests that have completed. A completion has the number of requests before and including its own.
    completed: u64,
    requests: Vec<IbvSendWr>,
    pieces: Vec<IbvSge>,
    returned: Arc<Returned>,
}

// SAFETY: the pointers in `requests` are set and used within one call of `flush`.
unsafe impl Send for Sender {}

/// A frame that waits to be sent: in a registered buffer, or in memory of its own if none was free.
enum Frame {
    Buffered(u32, usize),
    Owned(Vec<u8>),
}

impl Sender {
    /// Creates the queue of a pair that accepts `depth` requests at a time, and sends from the buffers of `pool`. The
    /// pair must be destroyed before the queue.
    pub(super) fn new(pool: &Pool, depth: u32) -> Sender {
        let depth = depth as usize;
        Sender {
            depth,
            waiting: VecDeque::with_capacity(depth),
            overflow: 0,
            posted: VecDeque::with_capacity(depth),
            completed: 0,
            requests: Vec::with_capacity(depth),
            pieces: Vec::with_capacity(depth),
            returned: Arc::clone(&pool.returned),
        }
    }

    /// Queues a frame. It leaves with the next [`Sender::flush`] that finds space.
    pub(super) fn push(&mut self, pool: &mut Pool, frame: &[u8]) {
        // A frame with memory of its own must not be overtaken, but it may be followed by others.
        match pool.take() {
            Some(buffer) => {
                // SAFETY: the buffer was free, so no request uses it.
                unsafe { pool.buffers.bytes(buffer, frame.len()) }.copy_from_slice(frame);
                self.waiting.push_back(Frame::Buffered(buffer, frame.len()));
            }
            None => {
                self.overflow += frame.len();
                self.waiting.push_back(Frame::Owned(frame.to_vec()));
            }
        }
    }

    /// Number of bytes of waiting frames that have no registered buffer.
    pub(super) fn overflow(&self) -> usize {
        self.overflow
    }

    /// Whether every frame was sent and has arrived.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.posted.is_empty()
    }

    /// Posts waiting frames as one list, as many as the pair accepts. The last one reports its completion.
    pub(super) fn flush(&mut self, pool: &mut Pool, pair: &Pair) -> Result<(), VerbsError> {
        self.requests.clear();
        self.pieces.clear();
        while self.posted.len() < self.depth
            && let Some(frame) = self.waiting.pop_front()
        {
            let (buffer, len) = match frame {
                Frame::Buffered(buffer, len) => (buffer, len),
                Frame::Owned(bytes) => {
                    let Some(buffer) = pool.take() else {
                        self.waiting.push_front(Frame::Owned(bytes));
                        break;
                    };
                    self.overflow -= bytes.len();
                    // SAFETY: the buffer was free, so no request uses it.
                    unsafe { pool.buffers.bytes(buffer, bytes.len()) }.copy_from_slice(&bytes);
                    (buffer, bytes.len())
                }
            };
            let inline = if len <= pair.inline_max() { is::SEND_INLINE } else { 0 };
            self.requests.push(IbvSendWr::new(is::WR_SEND, inline));
            self.pieces.push(pool.buffers.piece(buffer, 0, len));
            self.posted.push_back(Some(buffer));
        }
        let count = self.requests.len();
        let Some(last) = self.requests.last_mut() else { return Ok(()) };
        last.send_flags |= is::SEND_SIGNALED;
        let first = self.completed + (self.posted.len() - count) as u64;
        for (request, number) in self.requests.iter_mut().zip(first + 1..) {
            request.wr_id = number;
        }
        // SAFETY: the pieces are of registered buffers of the pair's domain, which stay in `posted` until they have
        // completed.
        unsafe { pair.post(&mut self.requests, &mut self.pieces) }?;
        // A frame that its request carries itself was copied when it was posted.
        for (place, request) in self.requests.iter().enumerate() {
            if request.send_flags & is::SEND_INLINE != 0 {
                let posted = self.posted.len() - count + place;
                pool.free.extend(self.posted[posted].take());
            }
        }
        Ok(())
    }

    /// Notes that all requests up to number `number` have completed.
    pub(super) fn complete(&mut self, pool: &mut Pool, number: u64) {
        while self.completed < number
            && let Some(buffer) = self.posted.pop_front()
        {
            self.completed += 1;
            pool.free.extend(buffer);
        }
    }
}

impl Drop for Sender {
    /// Frees all buffers: the pair is destroyed, so no request uses them.
    fn drop(&mut self) {
        let mut returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
        returned.extend(self.posted.drain(..).flatten());
        returned.extend(self.waiting.drain(..).filter_map(|frame| match frame {
            Frame::Buffered(buffer, _) => Some(buffer),
            Frame::Owned(_) => None,
        }));
    }
}
