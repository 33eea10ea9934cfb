//! Two rings in shared memory: one for requests, one for replies.
//!
//! The reader polls the slot of the next message until the message's id appears in the slot. The writer publishes a
//! message of several requests by writing the id of the first request last. So the reader does not poll the cache
//! lines of the other requests.
//!
//! Invariant: the slot of id i is reused for id i + slots. At most `slots` requests are in flight, so the reader has
//! finished with id i before this reuse, and needs no acknowledgement.
//! Invariant: each slot has one writer, which does not write between a slot's publication and the reader's next
//! message.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::futex;

use super::client::ClientEnd;
use super::message::{Asked, FIRST_ID, Format, REQUEST_SIZE, REQUEST_TOGETHER, Reply, Requests, request};
use super::server::{ItemSource, ServerEnd, Turn};
use super::{ANSWER_TIMEOUT, Echo, invalid, no_answer, reply_size};
use crate::floor::overwrite::Values;

/// Number of polls before the poller yields the CPU. A poll is a load and a pause: 256 polls take a few microseconds.
const POLLS_PER_YIELD: u32 = 256;

/// Layout of the memory: | bell of requests | bell of replies | goodbye | slots of requests | slots of replies |
/// values |. Bells and goodbye take two cache lines each, because CPUs fetch lines in pairs. There is one value for
/// each slot of requests, if requests have values. The writer of a request also writes its value, before it publishes
/// the request.
const REQUESTS_BELL: usize = 0;
const REPLIES_BELL: usize = 128;
const GOODBYE: usize = 256;
const REQUESTS: usize = 384;

const CACHE_LINE: usize = 64;
/// Distance in bytes between two slots of requests. Two requests share a cache line, because they are usually
/// published together.
const REQUEST_STRIDE: usize = 32;

/// State of a bell whose reader is awake, or polls once more before it sleeps.
const AWAKE: u32 = 0;
/// State of a bell whose reader sleeps, or is about to sleep.
const ASLEEP: u32 = 1;

const _: () = assert!(REQUEST_STRIDE >= REQUEST_SIZE && REQUESTS.is_multiple_of(CACHE_LINE));

/// Client's end of two rings.
pub(super) struct Near {
    rings: Rings,
    values: Values,
    /// Copies of the items, one for each task, because the server may reuse a slot as soon as its reply was taken.
    fetched: Vec<u8>,
}

/// Server's end of two rings.
pub(super) struct Far {
    rings: Rings,
    next: u64,
}

/// The mapping of both rings, and its layout.
struct Rings {
    base: NonNull<u8>,
    len: usize,
    slots: usize,
    format: Format,
    blocking: bool,
    requests: Ring,
    replies: Ring,
    /// Offset in the mapping of the first value, and the distance between two values.
    values_at: usize,
    value_stride: usize,
}

/// Layout of one of the two rings. `bell` and `at` are offsets in the mapping; `id` and `together` are offsets in a
/// slot.
#[derive(Clone, Copy)]
struct Ring {
    bell: usize,
    at: usize,
    stride: usize,
    id: usize,
    together: usize,
}

/// Creates both rings. Returns the client's end and the file that the server maps.
pub(super) fn open(echo: &Echo) -> io::Result<(Near, OwnedFd)> {
    let file = memfd_create(c"farside-floor-ring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, Rings::len(echo) as u64)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let fetched = vec![0; echo.tasks * echo.item_size()];
    Ok((Near { rings: Rings::map(echo, &file)?, values: echo.values(), fetched }, file))
}

impl ClientEnd for Near {
    const POLLS_PER_YIELD: u32 = POLLS_PER_YIELD;

    #[inline(always)]
    fn send(&mut self, first: u64, count: usize, asked: &Asked) -> io::Result<()> {
        let rings = &self.rings;
        for id in first..first + count as u64 {
            let bytes = request(id, asked, rings.format.op);
            // SAFETY: the slot is mapped and wide enough. The server does not read it before it is published, because
            // the reply to its previous request has been taken.
            unsafe {
                let slot = rings.slot(&rings.requests, id);
                ptr::copy_nonoverlapping(bytes[8..].as_ptr(), slot.add(8), REQUEST_SIZE - 8);
            }
            if asked.is_overwrite(id) {
                let value = asked.value(id, &self.values);
                // SAFETY: as above, for the value of the slot. All values have the size of the format.
                unsafe { ptr::copy_nonoverlapping(value.as_ptr(), rings.value(id), value.len()) };
            }
        }
        rings.publish(&rings.requests, first, count);
        Ok(())
    }

    #[inline(always)]
    fn take(
        &mut self,
        next: u64,
        _in_flight: usize,
        asked: &Asked,
        mut each: impl FnMut(Reply<'_>),
    ) -> io::Result<usize> {
        let rings = &self.rings;
        if rings.blocking && !rings.sleep(&rings.replies, next, Some(ANSWER_TIMEOUT))? {
            return Err(no_answer());
        }
        let count = rings.arrived(&rings.replies, next)?;
        let item_size = rings.format.item_size;
        for (id, fetched) in (next..next + count as u64).zip(self.fetched.chunks_exact_mut(item_size)) {
            let item = if asked.is_overwrite(id) { &mut [][..] } else { fetched };
            let found;
            // SAFETY: the slot is mapped and holds an item and its trailer. The server has published it, and does not
            // write to it before this client's next request.
            unsafe {
                let slot = rings.slot(&rings.replies, id);
                ptr::copy_nonoverlapping(slot, item.as_mut_ptr(), item.len());
                found = slot.add(rings.found()).cast::<u32>().read();
            }
            each(Reply { id: rings.id(&rings.replies, id).load(Ordering::Relaxed), found: found == 1, item });
        }
        Ok(count)
    }
}

impl Drop for Near {
    fn drop(&mut self) {
        self.rings.goodbye().store(1, Ordering::SeqCst);
        self.rings.ring(&self.rings.requests);
    }
}

impl Far {
    pub(super) fn new(echo: &Echo, far: OwnedFd) -> io::Result<Self> {
        let sealed = fcntl_get_seals(&far).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if !sealed || fstat(&far)?.st_size != Rings::len(echo) as i64 {
            return Err(invalid(
                "the descriptor is no ring with these parameters: use the one that was created with the client's end"
                    .into(),
            ));
        }
        Ok(Self { rings: Rings::map(echo, &far)?, next: FIRST_ID })
    }
}

impl ServerEnd for Far {
    const POLLS_PER_YIELD: u32 = POLLS_PER_YIELD;

    #[inline(always)]
    fn turn(&mut self, source: &mut ItemSource) -> io::Result<Turn> {
        let rings = &self.rings;
        if rings.blocking {
            rings.sleep(&rings.requests, self.next, None)?;
        }
        let count = rings.arrived(&rings.requests, self.next)?;
        if count == 0 {
            let closed = rings.goodbye().load(Ordering::Relaxed) != 0;
            return Ok(if closed { Turn::Closed } else { Turn::Nothing });
        }
        let ids = self.next..self.next + count as u64;
        let mut requests = Requests::new(self.next);
        for id in ids.clone() {
            let mut bytes = [0; REQUEST_SIZE];
            // SAFETY: the slot is mapped. The client has published it, and does not write to it before it has the
            // reply.
            unsafe {
                ptr::copy_nonoverlapping(rings.slot(&rings.requests, id), bytes.as_mut_ptr(), REQUEST_SIZE)
            };
            requests.push(&bytes, &rings.format)?;
        }
        // SAFETY: the slots are mapped. There are at least `count` slots, so each is borrowed once. The client reads
        // none of them before it is published.
        let items = ids.clone().map(|id| unsafe {
            slice::from_raw_parts_mut(rings.slot(&rings.replies, id), rings.format.item_size)
        });
        // SAFETY: a request with a value has one in the mapping. The client does not write it before it has the reply.
        let value = |index| unsafe {
            slice::from_raw_parts(
                rings.value(requests.first + index as u64).cast_const(),
                rings.format.value_size,
            )
        };
        let found = source.answer(&requests, value, items);
        for (id, index) in ids.clone().zip(0..) {
            let found = (found >> index) as u32 & 1;
            // SAFETY: as above, for the trailer behind the item.
            unsafe { rings.slot(&rings.replies, id).add(rings.found()).cast::<u32>().write(found) };
        }
        rings.publish(&rings.replies, self.next, count);
        self.next = ids.end;
        Ok(Turn::Answered)
    }
}

impl Rings {
    fn slots(echo: &Echo) -> usize {
        echo.tasks.next_power_of_two()
    }

    fn len(echo: &Echo) -> usize {
        let slots = Self::slots(echo);
        let requests = (slots * REQUEST_STRIDE).next_multiple_of(CACHE_LINE);
        let replies = slots * reply_size(echo.item_size()).next_multiple_of(CACHE_LINE);
        REQUESTS + requests + replies + slots * Self::value_stride(echo)
    }

    /// Returns the distance in bytes between two values of requests.
    fn value_stride(echo: &Echo) -> usize {
        let Format { has_overwrites, value_size, .. } = echo.format();
        if has_overwrites { value_size.next_multiple_of(CACHE_LINE) } else { 0 }
    }

    /// Maps `file`, which has the length [`Rings::len`] and is sealed against shrinking.
    fn map(echo: &Echo, file: impl AsFd) -> io::Result<Self> {
        let (slots, len) = (Self::slots(echo), Self::len(echo));
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: the kernel chooses the address, so the new mapping overlaps no existing one.
        let base = unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags, file, 0)? };
        let requests = Ring {
            bell: REQUESTS_BELL,
            at: REQUESTS,
            stride: REQUEST_STRIDE,
            id: 0,
            together: REQUEST_TOGETHER,
        };
        let stride = reply_size(echo.item_size()).next_multiple_of(CACHE_LINE);
        let replies = Ring {
            bell: REPLIES_BELL,
            at: REQUESTS + (slots * REQUEST_STRIDE).next_multiple_of(CACHE_LINE),
            stride,
            id: stride - 8,
            together: stride - 12,
        };
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self {
            base,
            len,
            slots,
            format: echo.format(),
            blocking: echo.blocking,
            requests,
            replies,
            values_at: replies.at + slots * stride,
            value_stride: Self::value_stride(echo),
        })
    }

    /// Returns the offset of the field `found` in a reply.
    #[inline(always)]
    fn found(&self) -> usize {
        self.replies.together - size_of::<u32>()
    }

    /// Returns the address of the slot of `id`. The slot has `ring.stride` bytes and is aligned to 32.
    #[inline(always)]
    fn slot(&self, ring: &Ring, id: u64) -> *mut u8 {
        let index = id as usize & (self.slots - 1);
        // SAFETY: `slots` is a power of two, so `index` is below it, and `len` includes `slots` slots of each ring.
        unsafe { self.base.as_ptr().add(ring.at + index * ring.stride) }
    }

    /// Returns the address of the value of request `id`, which has `value_stride` bytes.
    #[inline(always)]
    fn value(&self, id: u64) -> *mut u8 {
        let index = id as usize & (self.slots - 1);
        // SAFETY: as for the slots: `len` includes `slots` values.
        unsafe { self.base.as_ptr().add(self.values_at + index * self.value_stride) }
    }

    #[inline(always)]
    fn id(&self, ring: &Ring, id: u64) -> &AtomicU64 {
        // SAFETY: an aligned word of a slot, mapped until `self` drops. Both sides access it only as an atomic while
        // the other side may access it.
        unsafe { AtomicU64::from_ptr(self.slot(ring, id).add(ring.id).cast()) }
    }

    #[inline(always)]
    fn together(&self, ring: &Ring, id: u64) -> &AtomicU32 {
        // SAFETY: as for the id. The writer of a request also fills it before it publishes the request.
        unsafe { AtomicU32::from_ptr(self.slot(ring, id).add(ring.together).cast()) }
    }

    fn bell(&self, ring: &Ring) -> &AtomicU32 {
        // SAFETY: an aligned word at the front, mapped until `self` drops, and accessed only as an atomic.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(ring.bell).cast()) }
    }

    fn goodbye(&self) -> &AtomicU32 {
        // SAFETY: as for the bells.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(GOODBYE).cast()) }
    }

    /// Publishes the `count` messages with the ids from `first` on.
    #[inline(always)]
    fn publish(&self, ring: &Ring, first: u64, count: usize) {
        for id in first + 1..first + count as u64 {
            self.id(ring, id).store(id, Ordering::Relaxed);
        }
        self.together(ring, first).store(count as u32, Ordering::Relaxed);
        // Release: pairs with the Acquire in `arrived`, so that all of the messages' bytes are visible with it.
        self.id(ring, first).store(first, Ordering::Release);
        if self.blocking {
            self.ring(ring);
        }
    }

    /// Returns the number of messages that were published together with `first`, or 0 if `first` was not published.
    #[inline(always)]
    fn arrived(&self, ring: &Ring, first: u64) -> io::Result<usize> {
        // Acquire: pairs with the Release in `publish`.
        if self.id(ring, first).load(Ordering::Acquire) != first {
            return Ok(0);
        }
        let count = self.together(ring, first).load(Ordering::Relaxed) as usize;
        if (1..=self.slots).contains(&count) { Ok(count) } else { Err(no_count(count, self.slots)) }
    }

    /// Wakes the reader of `ring` if it sleeps.
    fn ring(&self, ring: &Ring) {
        // SeqCst: pairs with the fence in `sleep`. Either the reader sees the message, or this thread sees that the
        // reader sleeps.
        fence(Ordering::SeqCst);
        if self.bell(ring).load(Ordering::Relaxed) == ASLEEP {
            self.bell(ring).store(AWAKE, Ordering::Relaxed);
            // A wake-up fails only for an invalid address.
            let _woken = futex::wake(self.bell(ring), futex::Flags::empty(), 1);
        }
    }

    /// Sleeps until `first` has arrived or the client has closed the channel. Returns false after `timeout`.
    fn sleep(&self, ring: &Ring, first: u64, timeout: Option<Duration>) -> io::Result<bool> {
        let timeout = timeout.map(|timeout| futex::Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: 0 });
        loop {
            self.bell(ring).store(ASLEEP, Ordering::Relaxed);
            // The other side may (1) have published before: then its message is seen here; (2) publish after: then it
            // sees the bell and rings it; (3) ring before this thread sleeps: then the bell's value has changed, and
            // the futex does not sleep.
            fence(Ordering::SeqCst);
            let has_come = self.arrived(ring, first)? > 0 || self.goodbye().load(Ordering::Relaxed) != 0;
            if has_come {
                self.bell(ring).store(AWAKE, Ordering::Relaxed);
                return Ok(true);
            }
            match futex::wait(self.bell(ring), futex::Flags::empty(), ASLEEP, timeout.as_ref()) {
                Ok(()) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::TIMEDOUT) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        // SAFETY: `map` mapped exactly this range, and no reference into it outlives `self`. An error would mean that
        // the range is not mapped; then there is nothing to undo.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cold]
fn no_count(count: usize, slots: usize) -> io::Error {
    let wrong = format!("{count} messages at once, in a ring of {slots}: the other side is broken");
    io::Error::new(io::ErrorKind::InvalidData, wrong)
}
