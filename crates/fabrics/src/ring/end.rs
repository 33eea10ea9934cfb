//! One side's end of a connection: it writes, reads and goes to sleep.
//!
//! Invariant: the tail that the other side stores lies after the bytes already read, and at most a ring ahead. The head
//! that the other side stores lies between its previous value and the number of bytes published to that side. Any other
//! value ends the connection.
//! Invariant: a frame is parsed only from a private copy, which is taken once.
//!
//! Why no side sleeps through a frame: before a side sleeps, it stores its wish, then polls once more. The other side
//! publishes bytes, then checks for a wish. All four accesses have one order, in which each side's second access
//! follows its first access. So either the sleeper sees the published bytes, or the publisher sees the wish and rings.

use super::shared::{Shared, Side, Unit, Word};
use super::{FRAME_MAX, OUTBOX_MAX, RING};
use crate::memory::units::UNIT;
use crate::session::carrier::Broken;
use std::collections::VecDeque;
use zerocopy::IntoBytes;

/// Size in bytes of the length field before each frame.
const LENGTH: usize = 4;
/// Number of bytes read before `head` is updated. Frequent updates would take the cache line from the writer.
const RELEASE: u64 = RING / 4;

/// Bit of a wish: ring the bell when there are frames to read.
const FRAMES: u64 = 1;
/// Bit of a wish: ring the bell when there is space to write.
const ROOM: u64 = 2;

/// Maximum size of any frame. A frame of this size fits once everything is read, even if `head` lags by up to
/// [`RELEASE`]. So there is no state in which both sides wait for each other.
pub(crate) const LONGEST: usize = (RING - RELEASE) as usize - LENGTH;

const _: () = assert!(FRAME_MAX <= LONGEST && RELEASE + extent(LONGEST) <= RING);

/// Why a connection is unusable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The other side has written data that no correct peer writes.
    Foreign,
    /// The other side has not read for so long that the outbox is full.
    ClosedPipe,
}

impl From<Fault> for Broken {
    fn from(fault: Fault) -> Broken {
        Broken(match fault {
            Fault::Foreign => "the rings hold data that no node of this release writes".into(),
            Fault::ClosedPipe => format!("the node has left {OUTBOX_MAX} bytes unread"),
        })
    }
}

/// The private copy of a received frame, which is parsed in place of the shared bytes.
pub(crate) struct Buffer {
    units: Box<[Unit]>,
    frame_max: usize,
}

impl Buffer {
    pub(super) fn new() -> Buffer {
        Buffer::of(FRAME_MAX)
    }

    /// Creates a buffer for frames of at most `frame_max` bytes; longer ones count as foreign.
    pub(crate) fn of(frame_max: usize) -> Buffer {
        assert!(frame_max <= LONGEST, "a frame has at most {LONGEST} bytes");
        Buffer { units: vec![Unit::default(); extent(frame_max) as usize / UNIT].into(), frame_max }
    }
}

/// One side's end of a connection.
pub(crate) struct End {
    side: Side,
    /// Number of bytes written.
    written: u64,
    /// Number of written bytes that were published to the other side.
    published: u64,
    /// Number of written bytes that the other side had read when its head was last loaded.
    taken: u64,
    /// Frames that did not fit into the ring, oldest first.
    outbox: VecDeque<Box<[u8]>>,
    outbox_bytes: usize,
    /// Number of bytes read.
    read: u64,
    /// Number of read bytes that were published to the other side.
    released: u64,
    /// Whether this side has stored a wish that may still be set.
    is_asleep: bool,
}

impl End {
    pub(crate) fn new(side: Side) -> End {
        End {
            side,
            written: 0,
            published: 0,
            taken: 0,
            outbox: VecDeque::new(),
            outbox_bytes: 0,
            read: 0,
            released: 0,
            is_asleep: false,
        }
    }

    /// Queues a frame, which leaves on the next [`End::flush`], or once the ring has space.
    ///
    /// # Errors
    /// [`Fault`] says why the connection is unusable; the frame is lost.
    pub(crate) fn send(&mut self, shared: &impl Shared, frame: &[u8]) -> Result<(), Fault> {
        assert!(frame.len() <= LONGEST, "a frame has at most {LONGEST} bytes, this one {}", frame.len());
        if self.outbox.is_empty() && self.write(shared, frame)? {
            return Ok(());
        }
        self.publish(shared); // The other side must read these bytes before there is space.
        if self.outbox_bytes + frame.len() > OUTBOX_MAX {
            return Err(Fault::ClosedPipe);
        }
        self.outbox_bytes += frame.len();
        self.outbox.push_back(frame.into());
        Ok(())
    }

    /// Publishes queued frames to the other side, as far as the ring has space.
    ///
    /// # Errors
    /// [`Fault::Foreign`]: the other side has stored an invalid head.
    pub(crate) fn flush(&mut self, shared: &impl Shared) -> Result<(), Fault> {
        while let Some(frame) = self.outbox.pop_front() {
            if !self.write(shared, &frame)? {
                self.outbox.push_front(frame);
                break;
            }
            self.outbox_bytes -= frame.len();
        }
        self.publish(shared);
        Ok(())
    }

    /// Whether all queued frames are in the ring.
    pub(super) fn has_sent_all(&self) -> bool {
        self.outbox.is_empty()
    }

    /// Passes the next published frame to `take`. Returns false if there is none. Takes one frame at a time, so that
    /// the response to it leaves while the other side handles the response to the previous frame.
    ///
    /// # Errors
    /// [`Fault::Foreign`]: the other side has written invalid data.
    #[inline]
    pub(crate) fn receive(
        &mut self,
        shared: &impl Shared,
        buffer: &mut Buffer,
        take: impl FnOnce(&[u8]),
    ) -> Result<bool, Fault> {
        if !self.outbox.is_empty() {
            self.flush(shared)?;
        }
        let writer = self.side.other();
        let fresh = shared.load(Word::Tail(writer)).wrapping_sub(self.read);
        if fresh == 0 {
            return Ok(false);
        }
        if fresh > RING || !fresh.is_multiple_of(UNIT as u64) {
            return Err(Fault::Foreign);
        }
        let (first, rest) = buffer.units.split_at_mut(1);
        shared.copy_out(writer, self.read, first);
        let [a, b, c, d, ..] = first[0].0;
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        if len > buffer.frame_max || extent(len) > fresh {
            return Err(Fault::Foreign);
        }
        let size = extent(len);
        let more = size as usize / UNIT - 1;
        if more > 0 {
            shared.copy_out(writer, self.read + UNIT as u64, &mut rest[..more]);
        }
        self.read += size;
        if self.read - self.released >= RELEASE {
            self.released = self.read;
            shared.store(Word::Head(writer), self.read);
            self.wake(shared, ROOM);
        }
        take(&buffer.units.as_bytes()[LENGTH..LENGTH + len]);
        Ok(true)
    }

    /// Passes on all frames that a peer has published before it hung up. Frames that the peer writes later are not
    /// read.
    ///
    /// # Errors
    /// [`Fault::Foreign`]: the peer has written invalid data. The earlier frames were passed on.
    pub(crate) fn receive_last(
        &mut self,
        shared: &impl Shared,
        buffer: &mut Buffer,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), Fault> {
        let from = self.read;
        let published = shared.load(Word::Tail(self.side.other())).wrapping_sub(from).min(RING);
        while self.read.wrapping_sub(from) < published && self.receive(shared, buffer, &mut take)? {}
        Ok(())
    }

    /// Stores the wish to be woken. If there is work already, withdraws the wish and returns false.
    pub(crate) fn may_sleep(&mut self, shared: &impl Shared) -> bool {
        let waits_for_room = !self.outbox.is_empty();
        self.is_asleep = true;
        shared.store(Word::Wish(self.side), if waits_for_room { FRAMES | ROOM } else { FRAMES });
        let has_frames = shared.load(Word::Tail(self.side.other())) != self.read;
        let has_room = waits_for_room && shared.load(Word::Head(self.side)) != self.taken;
        if has_frames || has_room {
            self.awake(shared);
            return false;
        }
        true
    }

    /// Clears this side's wish to be woken. Returns true if a wish was stored; then the bell may have been rung.
    pub(crate) fn awake(&mut self, shared: &impl Shared) -> bool {
        let was_asleep = std::mem::replace(&mut self.is_asleep, false);
        if was_asleep {
            shared.store(Word::Wish(self.side), 0);
        }
        was_asleep
    }

    /// Writes a frame into the ring. Returns false if there is no space.
    fn write(&mut self, shared: &impl Shared, frame: &[u8]) -> Result<bool, Fault> {
        let size = extent(frame.len());
        if self.written + size - self.taken > RING {
            self.load_head(shared)?;
            if self.written + size - self.taken > RING {
                return Ok(false);
            }
        }
        let (beginning, rest) = frame.split_at(frame.len().min(UNIT - LENGTH));
        let mut first = Unit::default();
        first.0[..LENGTH].copy_from_slice(&(frame.len() as u32).to_le_bytes());
        first.0[LENGTH..LENGTH + beginning.len()].copy_from_slice(beginning);
        shared.copy_in(self.side, self.written, &first.0);
        if !rest.is_empty() {
            shared.copy_in(self.side, self.written + UNIT as u64, rest);
        }
        self.written += size;
        Ok(true)
    }

    fn load_head(&mut self, shared: &impl Shared) -> Result<(), Fault> {
        let taken = shared.load(Word::Head(self.side));
        if !(self.taken..=self.published).contains(&taken) || !taken.is_multiple_of(UNIT as u64) {
            return Err(Fault::Foreign);
        }
        self.taken = taken;
        Ok(())
    }

    fn publish(&mut self, shared: &impl Shared) {
        if self.published != self.written {
            self.published = self.written;
            shared.store(Word::Tail(self.side), self.written);
            self.wake(shared, FRAMES);
        }
    }

    /// Rings the bell if the other side sleeps and wishes to be woken for `cause`.
    fn wake(&self, shared: &impl Shared, cause: u64) {
        let wish = Word::Wish(self.side.other());
        if shared.load(wish) & cause != 0 && shared.take(wish) != 0 {
            shared.ring();
        }
    }
}

/// Returns how many bytes of the ring a frame of `len` bytes takes, including its length field and padding.
const fn extent(len: usize) -> u64 {
    (LENGTH + len).next_multiple_of(UNIT) as u64
}
