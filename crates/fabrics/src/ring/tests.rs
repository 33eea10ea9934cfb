//! Tests of two ends, over three kinds of memory: real memory, memory that changes arbitrarily, and memory at whose
//! every access a scheduler may switch threads.

use super::end::{Buffer, End, Fault};
use super::shared::{Mapped, Memory, Shared, Side, Unit, Word, make};
use super::{FRAME_MAX, OUTBOX_MAX, RING};
use crate::memory::units::UNIT;
use farside_remote::draws::Draws;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, PoisonError};

/// Returns the two sides of one connection, both in this process.
fn pair() -> (Mapped, Mapped) {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("two sockets");
    let fd = make().expect("memory");
    let map = |socket: std::os::unix::net::UnixStream| Mapped {
        memory: Memory::map(&fd).expect("rings of the right size"),
        socket: socket.into(),
    };
    (map(ours), map(theirs))
}

/// Returns a random frame. Sizes at which the behaviour changes are more frequent.
fn frame(draws: &mut Draws) -> Vec<u8> {
    const EDGES: [usize; 9] = [0, 1, 11, 12, 13, 27, 28, FRAME_MAX - 1, FRAME_MAX];
    let len = match draws.below(4) {
        0 => draws.pick(&EDGES),
        1 => draws.below(64) as usize,
        _ => draws.below(FRAME_MAX as u64 + 1) as usize,
    };
    let first = draws.next();
    (0..len as u64).map(|at| first.wrapping_add(at * 31) as u8).collect()
}

#[test]
fn frames_of_all_sizes_arrive_complete_and_in_order() {
    let (mut held_back, mut bytes, mut asleep) = (0, 0, 0);
    for seed in 0..8 {
        let mut draws = Draws(seed);
        let (client, engine) = pair();
        let mut ends = [(End::new(Side::Client), &client), (End::new(Side::Engine), &engine)];
        let mut buffer = Buffer::new();
        let mut on_their_way = [VecDeque::new(), VecDeque::new()];
        for _ in 0..2000 {
            let side = draws.below(2) as usize;
            let (end, shared) = &mut ends[side];
            match draws.below(16) {
                0..10 if on_their_way[side].len() < 200 => {
                    let frame = frame(&mut draws);
                    end.send(*shared, &frame).expect("the other side reads");
                    bytes += frame.len() as u64;
                    on_their_way[side].push_back(frame);
                    held_back += usize::from(!end.has_sent_all());
                }
                10..14 => end.flush(*shared).expect("a valid peer"),
                14.. => {
                    let sent = &mut on_their_way[1 - side];
                    let mut take =
                        |frame: &[u8]| assert_eq!(Some(frame), sent.pop_front().as_deref(), "seed {seed}");
                    let has_received = end.receive(*shared, &mut buffer, &mut take).expect("a valid peer");
                    if !has_received && end.may_sleep(*shared) {
                        asleep += 1;
                        end.awake(*shared);
                    }
                }
                _ => {}
            }
        }
        while on_their_way.iter().any(|sent| !sent.is_empty()) {
            for side in 0..2 {
                let (end, shared) = &mut ends[side];
                end.flush(*shared).expect("a valid peer");
                let sent = &mut on_their_way[1 - side];
                let take = |frame: &[u8]| assert_eq!(Some(frame), sent.pop_front().as_deref(), "seed {seed}");
                end.receive(*shared, &mut buffer, take).expect("a valid peer");
            }
        }
    }
    assert!(
        held_back > 0 && asleep > 0 && bytes > 64 * RING,
        "{held_back} frames waited, {asleep} sleeps, {bytes} bytes"
    );
}

#[test]
fn unread_frames_wait_up_to_a_bound_and_none_is_lost() {
    let (client, engine) = pair();
    let (mut writer, mut reader) = (End::new(Side::Client), End::new(Side::Engine));
    let mut sent = 0u32;
    let frame = |number: u32| [&number.to_le_bytes()[..], &[7; 5000]].concat();
    while writer.send(&client, &frame(sent)).is_ok() {
        sent += 1;
    }
    assert_eq!(writer.send(&client, &frame(sent)), Err(Fault::ClosedPipe));
    assert!(u64::from(sent) * 5004 >= OUTBOX_MAX as u64 + RING - 2 * 5004, "{sent} frames");
    let mut buffer = Buffer::new();
    let mut read = 0;
    while read < sent {
        let take = |bytes: &[u8]| {
            assert_eq!(bytes, frame(read));
            read += 1;
        };
        assert_eq!(reader.receive(&engine, &mut buffer, take), Ok(true), "after {read}");
        writer.flush(&client).expect("a valid peer");
    }
}

/// Shared memory in which anything may change before each access.
struct Scribbled {
    words: [Cell<u64>; 6],
    bytes: RefCell<Vec<u8>>,
    draws: RefCell<Draws>,
    /// On average, one access in `rarely` finds that something has changed.
    rarely: u64,
    rings: Cell<u64>,
}

impl Scribbled {
    fn scribble(&self) {
        let draws = &mut *self.draws.borrow_mut();
        if draws.below(self.rarely) > 0 {
            return;
        }
        let word = &self.words[draws.below(6) as usize];
        match draws.below(8) {
            0 => word.set(draws.next()),
            1 => word.set(word.get().wrapping_add(16)),
            2 => word.set(word.get().wrapping_sub(16)),
            3 => word.set(word.get() ^ 1 << draws.below(64)),
            4 => word.set([0, 1, 15, 16, RING, RING + 16, u64::MAX, 1 << 63][draws.below(8) as usize]),
            5 => word.set(word.get().wrapping_add(RING)),
            6 => word.set(word.get().wrapping_add(16 * draws.below(RING / 16))),
            _ => {
                let at = draws.below(2 * RING) as usize / UNIT * UNIT;
                let len = [0, 12, FRAME_MAX as u32, FRAME_MAX as u32 + 1, u32::MAX, draws.next() as u32];
                let len = len[draws.below(6) as usize];
                self.bytes.borrow_mut()[at..at + 4].copy_from_slice(&len.to_le_bytes());
            }
        }
    }

    fn at(writer: Side, position: u64) -> usize {
        assert!(position.is_multiple_of(UNIT as u64));
        (writer as u64 * RING + position % RING) as usize
    }
}

fn index(word: Word) -> usize {
    match word {
        Word::Tail(side) => side as usize,
        Word::Head(side) => 2 + side as usize,
        Word::Wish(side) => 4 + side as usize,
    }
}

impl Shared for Scribbled {
    fn load(&self, word: Word) -> u64 {
        self.scribble();
        self.words[index(word)].get()
    }

    fn store(&self, word: Word, value: u64) {
        self.scribble();
        self.words[index(word)].set(value);
    }

    fn take(&self, word: Word) -> u64 {
        self.scribble();
        self.words[index(word)].take()
    }

    fn copy_in(&self, writer: Side, position: u64, bytes: &[u8]) {
        for (unit, bytes) in bytes.chunks(UNIT).enumerate() {
            self.scribble();
            let at = Scribbled::at(writer, position + (unit * UNIT) as u64);
            self.bytes.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    fn copy_out(&self, writer: Side, position: u64, to: &mut [Unit]) {
        for (unit, to) in to.iter_mut().enumerate() {
            self.scribble();
            let at = Scribbled::at(writer, position + (unit * UNIT) as u64);
            to.0.copy_from_slice(&self.bytes.borrow()[at..at + UNIT]);
        }
    }

    fn ring(&self) {
        self.rings.set(self.rings.get() + 1);
    }
}

#[test]
fn arbitrary_peer_writes_only_end_the_connection() {
    let (mut foreign, mut unread, mut frames, mut rings) = (0, 0, 0u64, 0);
    for seed in 0..2000 {
        let shared = Scribbled {
            words: Default::default(),
            bytes: RefCell::new(vec![0; 2 * RING as usize]),
            draws: RefCell::new(Draws(seed)),
            rarely: 1 << (seed % 14),
            rings: Cell::new(0),
        };
        let mut draws = Draws(!seed);
        let mut buffer = Buffer::new();
        let (mut engine, mut client) = (End::new(Side::Engine), End::new(Side::Client));
        for _ in 0..200 {
            // The client only produces frames to be damaged; whether its own end survives does not matter.
            let (end, is_engine) =
                if draws.below(2) == 0 { (&mut engine, true) } else { (&mut client, false) };
            let done = match draws.below(4) {
                0 => end.send(&shared, &frame(&mut draws)),
                1 => end.flush(&shared),
                2 => {
                    let take = |frame: &[u8]| {
                        assert!(frame.len() <= FRAME_MAX);
                        frames += 1;
                    };
                    end.receive(&shared, &mut buffer, take).map(drop)
                }
                _ => {
                    end.may_sleep(&shared);
                    end.awake(&shared);
                    Ok(())
                }
            };
            match done {
                Err(Fault::Foreign) => foreign += 1,
                Err(Fault::ClosedPipe) => unread += 1,
                Ok(()) => continue,
            }
            if is_engine {
                break;
            }
            client = End::new(Side::Client);
        }
        rings += shared.rings.get();
    }
    let fired = format!("{foreign} foreign, {unread} unread, {frames} frames, {rings} rings");
    assert!(foreign > 100 && frames > 1000 && rings > 100, "{fired}");
}

#[test]
fn an_impossible_counter_is_foreign() {
    let none = Cell::new(0u64);
    let impossible: [(Word, u64); 6] = [
        (Word::Tail(Side::Client), 1),
        (Word::Tail(Side::Client), RING + 16),
        (Word::Tail(Side::Client), u64::MAX - 15),
        (Word::Head(Side::Engine), 16),
        (Word::Head(Side::Engine), u64::MAX),
        (Word::Head(Side::Engine), RING + 16),
    ];
    for (word, value) in impossible {
        let (_client, engine) = pair();
        let mut end = End::new(Side::Engine);
        engine.store(word, value);
        let received = end.receive(&engine, &mut Buffer::new(), |_| none.set(none.get() + 1));
        if let Word::Tail(_) = word {
            assert_eq!(received, Err(Fault::Foreign), "{word:?} {value}");
            continue;
        }
        // The head is loaded only once the ring seems full.
        let sent = (0..=RING / FRAME_MAX as u64).try_for_each(|_| end.send(&engine, &[1; FRAME_MAX]));
        assert_eq!(sent, Err(Fault::Foreign), "{word:?} {value}");
    }
    assert_eq!(none.get(), 0, "no frame was passed on");
}

#[test]
fn a_frame_beyond_the_published_bytes_is_foreign() {
    for len in [13u32, FRAME_MAX as u32 + 1, u32::MAX] {
        let (client, engine) = pair();
        client.copy_in(Side::Client, 0, &len.to_le_bytes());
        client.store(Word::Tail(Side::Client), 16);
        let received = End::new(Side::Engine).receive(&engine, &mut Buffer::new(), |_| panic!("not a frame"));
        assert_eq!(received, Err(Fault::Foreign), "{len} bytes");
    }
}

/// Memory in which each access to a word is a scheduling point, with bells that a thread can wait for.
struct Stepped {
    words: [shuttle::sync::atomic::AtomicU64; 6],
    /// Access to the bytes is no scheduling point: frames are read only after they are published.
    bytes: Arc<Mutex<Vec<u8>>>,
    bells: [(shuttle::sync::Mutex<bool>, shuttle::sync::Condvar); 2],
}

/// One side's view of memory of the type [`Stepped`].
struct View {
    stepped: Arc<Stepped>,
    side: Side,
    /// If true, a wish reaches memory only after the next load, as on a CPU that delays stores.
    is_late: bool,
    late: Cell<Option<(Word, u64)>>,
}

impl View {
    fn sleep(&self) {
        let (rung, bell) = &self.stepped.bells[self.side as usize];
        let mut rung = rung.lock().expect("no thread panics");
        while !*rung {
            rung = bell.wait(rung).expect("no thread panics");
        }
        *rung = false;
    }

    fn bytes(&self) -> std::sync::MutexGuard<'_, Vec<u8>> {
        self.stepped.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared for View {
    fn load(&self, word: Word) -> u64 {
        let value = self.stepped.words[index(word)].load(SeqCst);
        if let Some((word, value)) = self.late.take() {
            self.stepped.words[index(word)].store(value, SeqCst);
        }
        value
    }

    fn store(&self, word: Word, value: u64) {
        if self.is_late && matches!(word, Word::Wish(_)) && value != 0 {
            return self.late.set(Some((word, value)));
        }
        self.stepped.words[index(word)].store(value, SeqCst);
    }

    fn take(&self, word: Word) -> u64 {
        self.stepped.words[index(word)].swap(0, SeqCst)
    }

    fn copy_in(&self, writer: Side, position: u64, bytes: &[u8]) {
        let mut ring = self.bytes();
        for (unit, bytes) in bytes.chunks(UNIT).enumerate() {
            let at = Scribbled::at(writer, position + (unit * UNIT) as u64);
            ring[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    fn copy_out(&self, writer: Side, position: u64, to: &mut [Unit]) {
        let ring = self.bytes();
        for (unit, to) in to.iter_mut().enumerate() {
            let at = Scribbled::at(writer, position + (unit * UNIT) as u64);
            to.0.copy_from_slice(&ring[at..at + UNIT]);
        }
    }

    fn ring(&self) {
        let (rung, bell) = &self.stepped.bells[self.side.other() as usize];
        *rung.lock().expect("no thread panics") = true;
        bell.notify_one();
    }
}

/// Sends `count` frames of `len` bytes; sleeps until `count` responses have arrived and all frames are sent.
fn converse(view: &View, count: u8, len: usize, begins: bool) {
    let mut end = End::new(view.side);
    let mut buffer = Buffer::new();
    let mut heard = 0;
    let mut due = if begins { count } else { 0 };
    loop {
        for number in 0..std::mem::take(&mut due) {
            end.send(view, &vec![number; len]).expect("a valid peer");
        }
        end.flush(view).expect("a valid peer");
        let received = end.receive(view, &mut buffer, |frame| {
            assert!(frame.len() == len && frame.iter().all(|&byte| byte == heard), "frame {heard}");
            heard += 1;
            due = if begins || heard < count { 0 } else { count };
        });
        let received = received.expect("a valid peer");
        if heard == count && due == 0 && end.has_sent_all() {
            return;
        }
        if !received && end.may_sleep(view) {
            view.sleep();
            end.awake(view);
        }
    }
}

/// Runs two sides that sleep whenever possible, under `schedules` different orders of their accesses.
fn explore(schedules: usize, count: u8, len: usize, is_late: bool) {
    let mut config = shuttle::Config::new();
    config.silence_warnings = true;
    let bytes = Arc::new(Mutex::new(vec![0; 2 * RING as usize]));
    let scheduler = shuttle::scheduler::RandomScheduler::new_from_seed(1, schedules);
    shuttle::Runner::new(scheduler, config).run(move || {
        let bells =
            std::array::from_fn(|_| (shuttle::sync::Mutex::new(false), shuttle::sync::Condvar::new()));
        let words = std::array::from_fn(|_| shuttle::sync::atomic::AtomicU64::new(0));
        let stepped = Arc::new(Stepped { words, bytes: Arc::clone(&bytes), bells });
        let view = |side| View { stepped: Arc::clone(&stepped), side, is_late, late: Cell::new(None) };
        let (client, engine) = (view(Side::Client), view(Side::Engine));
        let engine = shuttle::thread::spawn(move || converse(&engine, count, len, false));
        converse(&client, count, len, true);
        engine.join().expect("the engine thread completes");
    });
}

#[test]
fn a_sleeping_side_is_woken_by_published_frames() {
    explore(2000, 2, 40, false);
}

#[test]
fn a_side_that_waits_for_space_is_woken_by_reads() {
    // More frames than a ring holds.
    explore(100, (RING / FRAME_MAX as u64) as u8 + 8, FRAME_MAX, false);
}

#[test]
fn a_delayed_wish_would_let_a_side_sleep_for_ever() {
    let found = catch_unwind(AssertUnwindSafe(|| explore(2000, 2, 40, true)));
    let found = found.expect_err("the scheduler finds the deadlock");
    let found = found.downcast_ref::<String>().expect("the panic has a message");
    assert!(found.contains("deadlock"), "{found}");
}

#[test]
fn frames_written_after_a_hang_up_are_not_read() {
    let (client, engine) = pair();
    let (mut writer, mut reader) = (End::new(Side::Client), End::new(Side::Engine));
    let mut write = |number: u32| {
        writer.send(&client, &number.to_le_bytes()).expect("the ring has space");
        writer.flush(&client).expect("a valid peer");
    };
    (0..3).for_each(&mut write);
    let mut read = 0;
    let took = reader.receive_last(&engine, &mut Buffer::new(), |_| {
        read += 1;
        write(read);
    });
    assert_eq!((took, read), (Ok(()), 3));
}
