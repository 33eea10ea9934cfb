//! The client of an echo: keeps a fixed number of requests in flight, checks every reply, and measures the time.
//!
//! Invariant: each message of replies is followed by a message with the same number of requests, so the number of
//! messages in flight is constant.

use std::hint::black_box;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use super::message::{Asked, FIRST_ID, Reply};
use super::{ANSWER_TIMEOUT, Echo, Echoed, Poller};
use crate::floor::Workload;
use crate::floor::measure::{DRAWS, Draws, FETCHES_PER_LOOK, wrong_end};
use crate::floor::table::{Key, VALUE, key};
use crate::report::Latencies;

/// Client's end of a channel, over any medium.
pub(super) trait ClientEnd {
    /// Number of polls before the client yields the CPU.
    const POLLS_PER_YIELD: u32;

    /// Sends `count` requests of `asked` in one message. The ids of the requests count up from `first`.
    fn send(&mut self, first: u64, count: usize, asked: &Asked) -> io::Result<()>;

    /// Takes the replies that have arrived, and passes each reply to `each`. The first reply should have the id
    /// `next`. `asked` has the kinds of the replies, and `in_flight` is their number. Returns the number of replies
    /// taken.
    fn take(
        &mut self,
        next: u64,
        in_flight: usize,
        asked: &Asked,
        each: impl FnMut(Reply<'_>),
    ) -> io::Result<usize>;
}

/// A client of an echo, over any medium.
pub(super) trait Measures {
    fn measure(&mut self, duration: Duration) -> io::Result<Echoed>;
    fn measure_idle(&mut self, pause: Duration, rounds: u32) -> io::Result<Echoed>;
}

/// Client's end of a channel, with the state of its requests.
pub(super) struct Requester<A> {
    near: A,
    asked: Asked,
    in_flight: InFlight,
    tasks: usize,
    tasks_per_message: usize,
}

/// Ids of the requests in flight, and the next operations to request.
struct InFlight {
    draws: Draws,
    /// Number of operations requested before the next one.
    next: usize,
    /// Whether values may differ from those of the start.
    has_overwrites: bool,
    /// Id of the next request to send.
    id: u64,
    /// Id of the next reply to receive.
    awaited: u64,
    mismatches: u64,
}

impl<A> Requester<A> {
    pub(super) fn new(near: A, echo: &Echo) -> Self {
        let (tasks, tasks_per_message) = (echo.tasks, echo.tasks_per_message());
        let draws = Draws::new(&echo.layout, echo.workload);
        let has_overwrites = echo.workload == Workload::A;
        let (id, awaited) = (FIRST_ID, FIRST_ID);
        let in_flight = InFlight { draws, next: 0, has_overwrites, id, awaited, mismatches: 0 };
        Self { near, asked: Asked::new(), in_flight, tasks, tasks_per_message }
    }
}

impl<A: ClientEnd> Measures for Requester<A> {
    /// Keeps requests in flight for about `duration`. After each reading of the clock, times one message: from before
    /// its requests are sent until its last reply has arrived.
    fn measure(&mut self, duration: Duration) -> io::Result<Echoed> {
        let mut latencies = Latencies::new();
        let (began, mismatches) = (self.in_flight.awaited, self.in_flight.mismatches);
        let started = Instant::now();
        self.send_all()?;
        let (mut timed, mut looked, mut looked_at) = (self.in_flight.id, started, began);
        loop {
            let count = self.take()?;
            if self.in_flight.awaited >= timed {
                latencies.record(looked.elapsed());
                timed = u64::MAX;
            }
            let look = timed == u64::MAX && self.in_flight.awaited - looked_at >= FETCHES_PER_LOOK as u64;
            if look {
                (looked, looked_at) = (Instant::now(), self.in_flight.awaited);
                if looked - started >= duration {
                    break;
                }
            }
            self.send(count)?;
            if look {
                timed = self.in_flight.id;
            }
        }
        self.take_all()?;
        let (ops, elapsed) = (self.in_flight.awaited - began, started.elapsed());
        Ok(echoed(ops, elapsed, &latencies, self.in_flight.mismatches - mismatches))
    }

    fn measure_idle(&mut self, pause: Duration, rounds: u32) -> io::Result<Echoed> {
        let mut latencies = Latencies::new();
        let (began, mismatches) = (self.in_flight.awaited, self.in_flight.mismatches);
        let mut elapsed = Duration::ZERO;
        for _ in 0..rounds {
            thread::sleep(pause);
            let asked = Instant::now();
            self.send_all()?;
            self.take_all()?;
            let latency = asked.elapsed();
            latencies.record(latency);
            elapsed += latency;
        }
        let ops = self.in_flight.awaited - began;
        Ok(echoed(ops, elapsed, &latencies, self.in_flight.mismatches - mismatches))
    }
}

impl<A: ClientEnd> Requester<A> {
    /// Sends one request for every task.
    fn send_all(&mut self) -> io::Result<()> {
        let mut left = self.tasks;
        while left > 0 {
            let count = left.min(self.tasks_per_message);
            self.send(count)?;
            left -= count;
        }
        Ok(())
    }

    fn take_all(&mut self) -> io::Result<()> {
        while self.in_flight.awaited < self.in_flight.id {
            self.take()?;
        }
        Ok(())
    }

    #[inline(always)]
    fn send(&mut self, count: usize) -> io::Result<()> {
        let first = self.in_flight.draw(count, &mut self.asked);
        self.near.send(first, count, &self.asked)
    }

    /// Waits for a message of replies, checks the replies, and returns their number.
    #[inline(always)]
    fn take(&mut self) -> io::Result<usize> {
        let mut poller = Poller::new(A::POLLS_PER_YIELD, Some(ANSWER_TIMEOUT));
        loop {
            let (in_flight, asked) = (&mut self.in_flight, &self.asked);
            let (next, awaited) = (in_flight.awaited, (in_flight.id - in_flight.awaited) as usize);
            let count = self.near.take(next, awaited, asked, |reply| in_flight.deliver(&reply, asked))?;
            if count > 0 {
                return Ok(count);
            }
            poller.wait()?;
        }
    }
}

impl InFlight {
    /// Draws the next `count` operations into `asked`. Returns the id of the first request.
    #[inline(always)]
    fn draw(&mut self, count: usize, asked: &mut Asked) -> u64 {
        let first = self.id;
        for _ in 0..count {
            let draw = self.next % DRAWS;
            let number = u64::from(self.draws.keys[draw]);
            asked.enter(self.id, number, self.draws.is_overwrite(draw), draw as u8);
            self.next += 1;
            self.id += 1;
        }
        first
    }

    /// Passes the reply's item to a black box and checks it. The next key depends on the fetched bytes, as in the
    /// floor without messages.
    #[inline(always)]
    fn deliver(&mut self, reply: &Reply<'_>, asked: &Asked) {
        let mut is_right = reply.found && reply.id == self.awaited;
        if !asked.is_overwrite(self.awaited) {
            let number = asked.number(self.awaited);
            let item = black_box(reply.item);
            let wrong = wrong_end(&item[VALUE..], number, self.has_overwrites);
            is_right &= item[VALUE - size_of::<Key>()..VALUE] == key(number) && wrong == 0;
            self.next += usize::from(wrong);
        }
        self.mismatches += u64::from(!is_right);
        self.awaited += 1;
    }
}

fn echoed(ops: u64, elapsed: Duration, latencies: &Latencies, mismatches: u64) -> Echoed {
    let seconds = elapsed.as_secs_f64();
    let ops_per_s = ops as f64 / seconds;
    Echoed { ops, seconds, ops_per_s, rtt_us_p50: latencies.percentile_us(50.0), mismatches }
}
