//! One side's end of a connection: what it writes, what it reads, and how it falls asleep.
//!
//! Invariant: what the other side says it has written lies after what was read, and within a ring; what it says it
//! has read lies between what it said before and what was published to it. Anything else ends the connection.
//! Invariant: a frame is looked at only as it was copied out, once.
//!
//! Sleeping: a side stores its wish, then looks once more. The other publishes, then looks for a wish. Of these four
//! accesses, each side's second follows its first in one order for all: so the sleeper sees what was published, or
//! the publisher sees the wish, and rings.

use super::shared::{Shared, Side, Unit, Word};
use super::{FRAME_MAX, OUTBOX_MAX, RING};
use crate::memory::units::UNIT;
use crate::session::carrier::Broken;
use std::collections::VecDeque;
use zerocopy::IntoBytes;

/// Bytes before each frame.
const LENGTH: usize = 4;
/// So many bytes are read before the writer hears of it: the word that tells is on a line that the writer has.
const RELEASE: u64 = RING / 4;

/// To be woken when there is something to read.
const FRAMES: u64 = 1;
/// To be woken when there is room to write.
const ROOM: u64 = 2;

/// The most bytes of any frame: however much was read and not told, it has room once all was read, so that nobody
/// waits for the other for ever.
pub(crate) const LONGEST: usize = (RING - RELEASE) as usize - LENGTH;

const _: () = assert!(FRAME_MAX <= LONGEST && RELEASE + extent(LONGEST) <= RING);

/// Why a connection carries nothing more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The other side has written what none of ours writes.
    Foreign,
    /// The other side has not read for so long that there is no more room.
    Unread,
}

impl From<Fault> for Broken {
    fn from(fault: Fault) -> Broken {
        Broken(match fault {
            Fault::Foreign => "the rings hold what no node of this release writes".into(),
            Fault::Unread => format!("{OUTBOX_MAX} bytes wait for the node to read them"),
        })
    }
}

/// Where a frame is copied to before anyone looks at it.
pub(crate) struct Buffer {
    units: Box<[Unit]>,
    frame_max: usize,
}

impl Buffer {
    pub(super) fn new() -> Buffer {
        Buffer::of(FRAME_MAX)
    }

    /// One for frames of at most so many bytes; longer ones are foreign.
    pub(crate) fn of(frame_max: usize) -> Buffer {
        assert!(frame_max <= LONGEST, "a frame has at most {LONGEST} bytes");
        Buffer { units: vec![Unit::default(); extent(frame_max) as usize / UNIT].into(), frame_max }
    }
}

/// One side's end.
pub(crate) struct End {
    side: Side,
    /// Bytes that were written.
    written: u64,
    /// Of them, those of which the other side knows.
    published: u64,
    /// Of them, those that it had read when that was last looked at.
    taken: u64,
    /// Frames that found no room, in their order.
    outbox: VecDeque<Box<[u8]>>,
    outbox_bytes: usize,
    /// Bytes that were read.
    read: u64,
    /// Of them, those of which the other side knows.
    released: u64,
    /// A wish was stored, and may still be there.
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

    /// Takes a frame; it leaves by the next [`End::flush`], or when there is room.
    ///
    /// # Errors
    /// [`Fault`]; the frame is lost.
    pub(crate) fn send(&mut self, shared: &impl Shared, frame: &[u8]) -> Result<(), Fault> {
        assert!(frame.len() <= LONGEST, "a frame has at most {LONGEST} bytes, this one {}", frame.len());
        if self.outbox.is_empty() && self.write(shared, frame)? {
            return Ok(());
        }
        self.publish(shared); // What is there must be read before there is room.
        if self.outbox_bytes + frame.len() > OUTBOX_MAX {
            return Err(Fault::Unread);
        }
        self.outbox_bytes += frame.len();
        self.outbox.push_back(frame.into());
        Ok(())
    }

    /// Lets the other side have what was taken.
    ///
    /// # Errors
    /// [`Fault::Foreign`].
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

    /// Whether the other side can have all that was taken.
    pub(super) fn has_sent_all(&self) -> bool {
        self.outbox.is_empty()
    }

    /// Hands on the next frame that was published. False if there is none. One at a time: so that it is answered while
    /// the other side makes use of the answers to the one before.
    ///
    /// # Errors
    /// [`Fault::Foreign`].
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

    /// Hands on all that was published by now, of one who has hung up: what it writes later, nobody reads.
    ///
    /// # Errors
    /// [`Fault::Foreign`]. What came before was handed on.
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

    /// Wishes to be woken. False if there is something to do already, and the wish is withdrawn.
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

    /// Withdraws its wish, if there is one. True if there was: then the bell may have been rung.
    pub(crate) fn awake(&mut self, shared: &impl Shared) -> bool {
        let was_asleep = std::mem::replace(&mut self.is_asleep, false);
        if was_asleep {
            shared.store(Word::Wish(self.side), 0);
        }
        was_asleep
    }

    /// Writes a frame into the ring. False if there is no room.
    fn write(&mut self, shared: &impl Shared, frame: &[u8]) -> Result<bool, Fault> {
        let size = extent(frame.len());
        if self.written + size - self.taken > RING {
            self.look_what_was_taken(shared)?;
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

    fn look_what_was_taken(&mut self, shared: &impl Shared) -> Result<(), Fault> {
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

    /// Rings if the other side sleeps and wishes to be woken for `cause`.
    fn wake(&self, shared: &impl Shared, cause: u64) {
        let wish = Word::Wish(self.side.other());
        if shared.load(wish) & cause != 0 && shared.take(wish) != 0 {
            shared.ring();
        }
    }
}

/// Bytes of the ring that a frame of `len` bytes takes.
const fn extent(len: usize) -> u64 {
    (LENGTH + len).next_multiple_of(UNIT) as u64
}
