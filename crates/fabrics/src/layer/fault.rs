//! Faults in a carrier, chosen by a seed: datagrams are lost, duplicated, reordered and delayed, and connections reset.
//! With these faults, tests check over real sockets the properties that must hold under faults.
//!
//! [`FaultLine`] wraps a client's end, [`FaultPort`] an engine's end. Each applies faults in both directions. A
//! datagram that a fault delays is held until its time; `sleep_max` returns how long that is.
//!
//! Invariant: which fault hits a datagram depends only on the seed and on the earlier datagrams.
//! Invariant: a reliable carrier delivers its datagrams complete and in order until it breaks.

use crate::session::carrier::{Arrival, Broken, Datagrams, Dropped, Line, Port};
use crate::timer;
use farside_remote::draws::Draws;
use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Fault rates: the probability of each fault per datagram, in either direction.
#[derive(Clone, Debug, PartialEq)]
pub struct Faults {
    /// Probability that the datagram is lost.
    pub loss: f64,
    /// Probability that the datagram arrives twice, the second time later.
    pub duplicate: f64,
    /// Probability that the datagram is delayed alone, so that later ones overtake it.
    pub reorder: f64,
    /// Probability that the datagram is delayed together with all datagrams after it.
    pub delay: f64,
    /// Probability that the carrier breaks.
    pub reset: f64,
    /// Range from which each delay is drawn.
    pub wait: RangeInclusive<Duration>,
    /// Seed of the random choices.
    pub seed: u64,
}

impl Default for Faults {
    fn default() -> Faults {
        let wait = Duration::from_micros(100)..=Duration::from_millis(2);
        Faults { loss: 0.0, duplicate: 0.0, reorder: 0.0, delay: 0.0, reset: 0.0, wait, seed: 1 }
    }
}

/// Error: fault rates that the carrier cannot have. Contains the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidFaults(pub String);

impl std::fmt::Display for InvalidFaults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InvalidFaults {}

impl Faults {
    /// Checks that a carrier can have these faults.
    ///
    /// # Errors
    /// The invalid rate, and the valid alternatives.
    pub fn check(&self, is_reliable: bool) -> Result<(), InvalidFaults> {
        let Faults { loss, duplicate, reorder, delay, reset, .. } = *self;
        let named = [
            ("loss", loss),
            ("duplicate", duplicate),
            ("reorder", reorder),
            ("delay", delay),
            ("reset", reset),
        ];
        for (name, probability) in named {
            if !(0.0..=1.0).contains(&probability) {
                return Err(InvalidFaults(format!(
                    "{name}={probability} is not a probability: use a number from 0 to 1"
                )));
            }
            if is_reliable && probability > 0.0 && !matches!(name, "delay" | "reset") {
                return Err(InvalidFaults(format!(
                    "{name}={probability}: this carrier delivers every datagram, once and in order, and its users \
                     rely on that: ask for delay and reset alone, or use udp"
                )));
            }
        }
        if self.wait.is_empty() {
            return Err(InvalidFaults(format!(
                "the wait {:?} to {:?} is an empty range: give the shorter time first",
                self.wait.start(),
                self.wait.end()
            )));
        }
        Ok(())
    }

    /// Returns the same fault rates with another seed, which depends on the carrier's number `nth`.
    #[must_use]
    pub fn of_carrier(&self, nth: u64) -> Faults {
        Faults { seed: Draws(self.seed ^ nth.wrapping_mul(0x9e37_79b9_7f4a_7c15)).next(), ..self.clone() }
    }
}

/// Numbers of faults that have struck, in both directions. If several ends share one `Struck`, their faults are counted
/// together.
#[derive(Debug, Default)]
pub struct Struck {
    datagrams: AtomicU64,
    lost: AtomicU64,
    duplicated: AtomicU64,
    reordered: AtomicU64,
    delayed: AtomicU64,
    resets: AtomicU64,
}

/// Snapshot of the numbers in [`Struck`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Strikes {
    /// Number of datagrams that passed the fault layer.
    pub datagrams: u64,
    /// Number of datagrams lost.
    pub lost: u64,
    /// Number of datagrams duplicated.
    pub duplicated: u64,
    /// Number of datagrams delayed alone, so that later ones could overtake them.
    pub reordered: u64,
    /// Number of datagrams delayed together with all later ones.
    pub delayed: u64,
    /// Number of carriers reset.
    pub resets: u64,
}

impl Struck {
    /// Returns the numbers of faults so far.
    pub fn so_far(&self) -> Strikes {
        // Relaxed, as for the increments: the counts order no other accesses.
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Strikes {
            datagrams: read(&self.datagrams),
            lost: read(&self.lost),
            duplicated: read(&self.duplicated),
            reordered: read(&self.reordered),
            delayed: read(&self.delayed),
            resets: read(&self.resets),
        }
    }
}

impl std::fmt::Display for Strikes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "of {} datagrams {} lost, {} doubled, {} overtaken, {} late; {} resets",
            self.datagrams, self.lost, self.duplicated, self.reordered, self.delayed, self.resets
        )
    }
}

fn count(count: &AtomicU64) {
    count.fetch_add(1, Ordering::Relaxed);
}

/// One direction of a carrier: chooses a fault for each datagram, and holds those that are delayed.
struct Direction<A> {
    faults: Faults,
    draws: Draws,
    struck: Arc<Struck>,
    held: BinaryHeap<Reverse<Held<A>>>,
    /// Time before which no further datagram leaves. Datagrams held to be reordered may leave earlier.
    not_before: Duration,
    count: u64,
}

struct Held<A> {
    /// The time at which the datagram leaves, and its sequence number. Datagrams with equal times leave in sequence.
    due: (Duration, u64),
    whose: A,
    datagram: Vec<u8>,
}

impl<A> PartialEq for Held<A> {
    fn eq(&self, other: &Self) -> bool {
        self.due == other.due
    }
}
impl<A> Eq for Held<A> {}
impl<A> PartialOrd for Held<A> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<A> Ord for Held<A> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.due.cmp(&other.due)
    }
}

/// Error: the reset fault has struck, so the carrier must break.
#[derive(Debug, PartialEq, Eq)]
struct Reset;

impl<A: Copy + PartialEq> Direction<A> {
    fn new(faults: &Faults, nth: u64, struck: &Arc<Struck>) -> Direction<A> {
        Direction {
            faults: faults.clone(),
            draws: Draws(faults.of_carrier(nth).seed),
            struck: Arc::clone(struck),
            held: BinaryHeap::new(),
            not_before: Duration::ZERO,
            count: 0,
        }
    }

    /// Chooses the faults for a datagram. Accordingly passes the datagram on now, holds one or two copies for later, or
    /// drops it.
    fn judge(
        &mut self,
        now: Duration,
        whose: A,
        datagram: &[u8],
        mut pass: impl FnMut(A, &[u8]),
    ) -> Result<(), Reset> {
        self.release(now, &mut pass);
        let Faults { loss, duplicate, reorder, delay, reset, .. } = self.faults;
        count(&self.struck.datagrams);
        if self.draws.chance(reset) {
            count(&self.struck.resets);
            return Err(Reset);
        }
        if self.draws.chance(loss) {
            count(&self.struck.lost);
            return Ok(());
        }
        let mut due = now.max(self.not_before);
        if self.draws.chance(reorder) {
            count(&self.struck.reordered);
            due += self.wait();
        } else if self.draws.chance(delay) {
            count(&self.struck.delayed);
            due = due.max(now + self.wait());
            self.not_before = due;
        }
        if self.draws.chance(duplicate) {
            count(&self.struck.duplicated);
            let later = due + self.wait();
            self.hold(later, whose, datagram);
        }
        if due <= now {
            pass(whose, datagram);
        } else {
            self.hold(due, whose, datagram);
        }
        Ok(())
    }

    fn wait(&mut self) -> Duration {
        let (least, most) = (*self.faults.wait.start(), *self.faults.wait.end());
        least + (most - least).mul_f64(self.draws.share())
    }

    fn hold(&mut self, due: Duration, whose: A, datagram: &[u8]) {
        self.count += 1;
        self.held.push(Reverse(Held { due: (due, self.count), whose, datagram: datagram.to_vec() }));
    }

    /// Passes on the held datagrams that are due. Returns false if there were none.
    fn release(&mut self, now: Duration, mut pass: impl FnMut(A, &[u8])) -> bool {
        let mut has_passed = false;
        while self.due().is_some_and(|due| due <= now)
            && let Some(Reverse(held)) = self.held.pop()
        {
            pass(held.whose, &held.datagram);
            has_passed = true;
        }
        has_passed
    }

    /// Returns the time at which the next held datagram leaves.
    fn due(&self) -> Option<Duration> {
        self.held.peek().map(|Reverse(held)| held.due.0)
    }

    /// Drops the datagrams held for a peer whose carrier is closed.
    fn forget(&mut self, whose: A) {
        self.held.retain(|Reverse(held)| held.whose != whose);
    }
}

/// Returns the time from `now` until the earlier of the two moments `due`, or `None` if both are absent.
fn until(now: Duration, due: [Option<Duration>; 2]) -> Option<Duration> {
    due.into_iter().flatten().min().map(|due| due.saturating_sub(now))
}

/// A client's end of a carrier, with faults in both directions. After a reset, this end carries nothing more; the node
/// notices the reset when this end is dropped.
pub struct FaultLine<L> {
    inner: L,
    out: RefCell<Direction<()>>,
    back: RefCell<Direction<()>>,
    is_reset: Cell<bool>,
}

impl<L: Line> FaultLine<L> {
    /// Applies `faults` to `inner`, and counts them in `struck`.
    ///
    /// # Errors
    /// This carrier cannot have these faults.
    pub fn new(inner: L, faults: &Faults, struck: &Arc<Struck>) -> Result<FaultLine<L>, InvalidFaults> {
        faults.check(L::IS_RELIABLE)?;
        let [out, back] = [0, 1].map(|way| RefCell::new(Direction::new(faults, way, struck)));
        Ok(FaultLine { inner, out, back, is_reset: Cell::new(false) })
    }

    fn check(&self) -> Result<(), Broken> {
        if self.is_reset.get() { Err(self.reset()) } else { Ok(()) }
    }

    fn reset(&self) -> Broken {
        self.is_reset.set(true);
        Broken("the connection was reset by the fault layer".into())
    }

    /// Sends the held datagrams that are due. Returns false if there were none.
    fn send_held(&self, now: Duration) -> Result<bool, Broken> {
        let mut sent = Ok(());
        let has_sent = self.out.borrow_mut().release(now, |(), datagram| {
            if sent.is_ok() {
                sent = self.inner.send(datagram);
            }
        });
        sent.map(|()| has_sent)
    }
}

impl<L: Line> Datagrams for FaultLine<L> {
    fn send(&self, datagram: &[u8]) -> Result<(), Broken> {
        self.check()?;
        let mut sent = Ok(());
        let judged = self.out.borrow_mut().judge(timer::now(), (), datagram, |(), datagram| {
            if sent.is_ok() {
                sent = self.inner.send(datagram);
            }
        });
        judged.map_err(|Reset| self.reset())?;
        sent
    }

    fn flush(&self) -> Result<(), Broken> {
        self.check()?;
        self.send_held(timer::now())?;
        self.inner.flush()
    }

    fn receive(&self, mut take: impl FnMut(&[u8])) -> Result<bool, Broken> {
        self.check()?;
        let now = timer::now();
        let sent =
            self.send_held(now).and_then(|has_sent| if has_sent { self.inner.flush() } else { Ok(()) });
        let mut back = self.back.borrow_mut();
        let mut judged = Ok(());
        let received = self.inner.receive(|datagram| {
            if judged.is_ok() {
                judged = back.judge(now, (), datagram, |(), datagram| take(datagram));
            }
        });
        judged.map_err(|Reset| self.reset())?;
        // Datagrams that the carrier delivered before it broke count as received.
        let until = if sent.is_ok() && received.is_ok() { now } else { Duration::MAX };
        let has_released = back.release(until, |(), datagram| take(datagram));
        sent?;
        received.map(|has_received| has_received || has_released)
    }
}

impl<L: Line> Line for FaultLine<L> {
    const IS_RELIABLE: bool = L::IS_RELIABLE;

    fn datagram_max(&self) -> usize {
        self.inner.datagram_max()
    }

    fn inbound_bytes(&self) -> usize {
        self.inner.inbound_bytes()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.inner.fd()
    }

    fn may_sleep(&self) -> bool {
        self.inner.may_sleep() && self.sleep_max() != Some(Duration::ZERO)
    }

    fn sleep_max(&self) -> Option<Duration> {
        let held = until(timer::now(), [self.out.borrow().due(), self.back.borrow().due()]);
        [held, self.inner.sleep_max()].into_iter().flatten().min()
    }
}

/// An engine's end of a carrier, with faults in both directions. A reset hits one client.
pub struct FaultPort<P: Port> {
    inner: P,
    out: Direction<P::Address>,
    back: Direction<P::Address>,
    /// Addresses that were reset and not yet reported to the engine.
    reset: Vec<P::Address>,
}

impl<P: Port> FaultPort<P> {
    /// Applies `faults` to `inner`, and counts them in `struck`.
    ///
    /// # Errors
    /// This carrier cannot have these faults.
    pub fn new(inner: P, faults: &Faults, struck: &Arc<Struck>) -> Result<FaultPort<P>, InvalidFaults> {
        faults.check(P::IS_RELIABLE)?;
        let [out, back] = [0, 1].map(|way| Direction::new(faults, way, struck));
        Ok(FaultPort { inner, out, back, reset: Vec::new() })
    }
}

impl<P: Port<Address: Send>> Port for FaultPort<P> {
    type Address = P::Address;

    const IS_RELIABLE: bool = P::IS_RELIABLE;

    fn datagram_max(&self) -> usize {
        self.inner.datagram_max()
    }

    fn receive(&mut self, mut take: impl FnMut(P::Address, Arrival<'_>)) -> Result<bool, Broken> {
        let FaultPort { inner, out, back, reset } = self;
        let now = timer::now();
        if out.release(now, |to, datagram| inner.send(to, datagram)) {
            inner.flush();
        }
        let received = inner.receive(|from, arrival| match arrival {
            Arrival::Datagram(datagram) => {
                let judged =
                    back.judge(now, from, datagram, |from, datagram| take(from, Arrival::Datagram(datagram)));
                if judged.is_err() {
                    reset.push(from);
                }
            }
            Arrival::HungUp => {
                back.forget(from);
                out.forget(from);
                take(from, Arrival::HungUp);
            }
            Arrival::Outsider(..) => take(from, arrival),
        })?;
        let mut has_more = back.release(now, |from, datagram| take(from, Arrival::Datagram(datagram)));
        for from in reset.drain(..) {
            back.forget(from);
            out.forget(from);
            inner.hang_up(from);
            take(from, Arrival::HungUp);
            has_more = true;
        }
        Ok(received || has_more)
    }

    fn send(&mut self, to: P::Address, datagram: &[u8]) {
        let FaultPort { inner, out, reset, .. } = self;
        let judged = out.judge(timer::now(), to, datagram, |to, datagram| inner.send(to, datagram));
        if judged.is_err() {
            reset.push(to);
        }
    }

    fn flush(&mut self) {
        let FaultPort { inner, out, .. } = self;
        out.release(timer::now(), |to, datagram| inner.send(to, datagram));
        inner.flush();
    }

    fn dropped(&self) -> Dropped {
        self.inner.dropped()
    }

    fn connections(&self) -> usize {
        self.inner.connections()
    }

    fn hang_up(&mut self, address: P::Address) {
        self.inner.hang_up(address);
    }

    fn close_without_session(&mut self, known: impl Iterator<Item = P::Address>) {
        self.inner.close_without_session(known);
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.inner.fd()
    }

    fn may_sleep(&mut self) -> bool {
        self.inner.may_sleep() && self.reset.is_empty() && self.sleep_max() != Some(Duration::ZERO)
    }

    fn sleep_max(&self) -> Option<Duration> {
        let held = until(timer::now(), [self.out.due(), self.back.due()]);
        [held, self.inner.sleep_max()].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Sends 1,000 datagrams, one per millisecond. Returns the datagrams that left, in order and each with its time,
    /// and the faults that struck.
    fn story(faults: &Faults) -> (Vec<(Duration, u32)>, Strikes) {
        let struck = Arc::default();
        let mut way = Direction::new(faults, 0, &struck);
        let mut left = Vec::new();
        for step in 0..1100u32 {
            let now = MS * step;
            let mut pass = |(), datagram: &[u8]| {
                left.push((now, u32::from_le_bytes(datagram.try_into().expect("four bytes"))));
            };
            if step < 1000 {
                assert_eq!(way.judge(now, (), &step.to_le_bytes(), &mut pass), Ok(()));
            } else {
                way.release(now, &mut pass);
            }
            assert!(way.due().is_none_or(|due| due > now), "a sleep until then does not overrun");
        }
        assert_eq!(way.due(), None, "all held datagrams have left");
        (left, struck.so_far())
    }

    fn faults() -> Faults {
        Faults { wait: 2 * MS..=20 * MS, seed: 7, ..Faults::default() }
    }

    #[test]
    fn equal_seeds_give_equal_faults() {
        let all = Faults { loss: 0.1, duplicate: 0.1, reorder: 0.1, delay: 0.01, ..faults() };
        assert_eq!(story(&all), story(&all));
        assert_ne!(story(&all), story(&Faults { seed: 8, ..all.clone() }));
        assert_ne!(all.of_carrier(1).seed, all.of_carrier(2).seed);
    }

    #[test]
    fn each_fault_has_its_effect_and_is_counted() {
        let numbers = |left: &[(Duration, u32)]| left.iter().map(|&(_, number)| number).collect::<Vec<_>>();
        let in_order: Vec<u32> = (0..1000).collect();

        let (left, struck) = story(&faults());
        assert_eq!(
            (numbers(&left), struck),
            (in_order.clone(), Strikes { datagrams: 1000, ..Strikes::default() })
        );

        let (left, struck) = story(&Faults { loss: 0.1, ..faults() });
        assert!((50..200).contains(&struck.lost), "{struck}");
        assert_eq!(left.len() as u64, 1000 - struck.lost);
        assert!(left.is_sorted());

        let (left, struck) = story(&Faults { duplicate: 0.1, ..faults() });
        assert!((50..200).contains(&struck.duplicated), "{struck}");
        assert_eq!(left.len() as u64, 1000 + struck.duplicated);
        let mut distinct = numbers(&left);
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct, in_order);

        let (left, struck) = story(&Faults { reorder: 0.1, ..faults() });
        assert!((50..200).contains(&struck.reordered), "{struck}");
        let overtaken = left.windows(2).filter(|pair| pair[0].1 > pair[1].1).count();
        assert!(left.len() == 1000 && overtaken > 20, "{overtaken}");
        assert!(left.iter().all(|&(at, number)| at >= MS * number && at <= MS * number + 21 * MS));

        let (left, struck) = story(&Faults { delay: 0.1, ..faults() });
        assert!((50..200).contains(&struck.delayed), "{struck}");
        assert_eq!(numbers(&left), in_order, "no datagram overtakes another");
        assert!(left.iter().any(|&(at, number)| at >= MS * number + 2 * MS));
    }

    #[test]
    fn a_reset_comes_at_its_rate() {
        let struck = Arc::default();
        let mut way = Direction::new(&Faults { reset: 0.01, ..faults() }, 0, &struck);
        let judged = (0..10_000).position(|_| way.judge(MS, (), b"?", |(), _| {}).is_err());
        assert!(judged.is_some_and(|judged| judged < 2000), "{judged:?}");
        assert_eq!(struck.so_far().resets, 1);
    }

    #[test]
    fn a_reliable_carrier_can_only_be_delayed_or_reset() {
        let can = |faults: Faults| faults.check(true).map_err(|impossible| impossible.0);
        assert_eq!(can(Faults { delay: 0.5, reset: 0.5, ..faults() }), Ok(()));
        for faults in [
            Faults { loss: 0.1, ..faults() },
            Faults { duplicate: 0.1, ..faults() },
            Faults { reorder: 0.1, ..faults() },
        ] {
            assert!(faults.check(false).is_ok());
            assert!(can(faults).is_err_and(|reason| reason.contains("ask for delay and reset")));
        }
        for probability in [-0.1, 1.1, f64::NAN] {
            assert!(
                can(Faults { delay: probability, ..faults() }).is_err_and(|reason| reason.contains("0 to 1"))
            );
        }
        #[allow(clippy::reversed_empty_ranges, reason = "an invalid range, which must be rejected")]
        let reversed = Faults { wait: 2 * MS..=MS, ..faults() };
        assert!(can(reversed).is_err_and(|reason| reason.contains("the shorter")));
    }
}
