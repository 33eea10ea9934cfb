//! Timestamps of a client: microseconds since the store's creation, by the client's own wall clock, which may be wrong
//! and may jump.
//!
//! - Stamps of one client id rise strictly. All tasks of the client share one [`Stamps`].
//! - Each stamp is below a *reservation*, a word of the client's entry in the table of leases. A client that reopens
//!   the id after a crash begins above the highest reservation that a majority of the members has.
//! - A stamp that is more than [`AHEAD_MAX`] ahead of a member's clock is refused before it touches anything. Otherwise
//!   one client with a wrong clock would force all others to stamps in the future.
//!
//! ```text
//! entry | nonce u64 | beat u64 | epoch u64 | reservation u64, big-endian |       the table of leases, see crate::lease
//! ```
//!
//! A client asks each member for its clock when it opens its stamps, and from then on in [`Stamps::keep`]. In between
//! it adds the time that has passed on its own monotonic clock. So an operation does not wait for a node's process.
//!
//! The store's creation is that of its first member. Stores of earlier releases have no time of creation: their stamps
//! count from the Unix epoch.
//!
//! Invariant: a stamp is given only once a majority has acknowledged a higher reservation.
//! Invariant: a reservation never falls. A late or repeated request to raise it changes nothing.

use crate::ask;
use crate::lease::{ClientId, Lease, LeaseError, Leases, MEMBERS_MAX, Table};
use crate::quorum::quorum;
use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::fabric::Ran;
use farside_remote::{ChainBuf, Fabric, FabricError, NodeId, Reply, read_as};
use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;
use zerocopy::big_endian::U64;

/// Longest time by which a stamp may be ahead of a member's clock.
pub const AHEAD_MAX: Duration = Duration::from_millis(500);
/// Length of the time for which a client reserves stamps.
const HORIZON: Duration = Duration::from_millis(100);
/// Time between two questions for a member's clock.
const ASK_EVERY: Duration = Duration::from_secs(2);
/// Longest time of a question for a member's clock whose answer counts, except the first.
const ASK_MAX: Duration = Duration::from_millis(20);
/// Number of attempts to get an answer within that time when the stamps are opened.
const ATTEMPTS: u32 = 5;
/// Smallest difference between a client's wall clock and its monotonic clock that counts as a jump.
const JUMP_MIN: Duration = Duration::from_millis(20);

/// Mutants of stamps.
pub mod mutants {
    farside_remote::mutants! {
        /// A stamp is the time of the client's clock, even if the clock has jumped back.
        STAMPS_FOLLOW_THE_CLOCK = "StampsFollowTheClock";
        /// A client that reopens an id ignores the id's reservation.
        RESERVATION_FORGOTTEN = "ReservationForgotten";
        /// A stamp that is far ahead of a member's clock is not refused.
        AHEAD_ACCEPTED = "AheadAccepted";
    }
}

/// Reason why a stamp was not given. Nothing was changed, except perhaps a reservation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StampError {
    /// The stamp is too far ahead of a member's clock. The times are in microseconds since the store's creation.
    Ahead {
        /// Node of the member.
        node: NodeId,
        /// The stamp.
        stamp: u64,
        /// Time by this client's clock.
        own: u64,
        /// Time by the node's clock.
        theirs: u64,
    },
    /// The reservation failed.
    Lease(LeaseError),
}

impl From<LeaseError> for StampError {
    fn from(error: LeaseError) -> StampError {
        StampError::Lease(error)
    }
}

impl From<FabricError> for StampError {
    fn from(error: FabricError) -> StampError {
        StampError::Lease(LeaseError::Fabric(error))
    }
}

impl std::fmt::Display for StampError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            StampError::Ahead { node, stamp, own, theirs } => write!(
                f,
                "the timestamp {stamp} us is more than {} ms ahead of the clock of node {}, and nothing was changed: \
                 since the store's creation, {own} us have passed by this machine's clock and {theirs} us by the \
                 node's; set both clocks, for example by NTP, then retry",
                AHEAD_MAX.as_millis(),
                node.0
            ),
            StampError::Lease(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for StampError {}

/// A member's clock: what it showed, and when that was by the client's monotonic clock.
#[derive(Clone, Copy, Debug, Default)]
struct Shown {
    /// Microseconds since the store's creation.
    time: u64,
    at: Duration,
}

/// A member of the store, whose clock is asked.
struct Member {
    node: NodeId,
    store: Store,
    shown: Cell<Shown>,
}

/// The stamps of one client id. All tasks of the client share them.
pub struct Stamps<F> {
    fabric: F,
    members: Vec<Member>,
    /// Tables of leases with the id's reservations, one for each member or for the first ones.
    tables: Rc<[Cell<Table>]>,
    id: ClientId,
    /// The highest stamp so far.
    last: Cell<u64>,
    /// Stamps below this one may be given.
    reserved: Cell<u64>,
    /// The client's monotonic clock and its wall clock, as of the last check for jumps.
    clocks: Cell<(Duration, Duration)>,
    jumps: Cell<u64>,
}

impl<F: Fabric + Clock + Clone> Stamps<F> {
    /// Reads the id's reservation at a majority of the members, and asks all members for their clocks. `stores` has the
    /// store's description at each member, in the order of the tables of `leases`. The caller has bound its sessions to
    /// the lease's nonce ([`Leases::bind`]).
    ///
    /// # Errors
    /// [`StampError`]: a majority does not answer, or a member does not tell its clock.
    ///
    /// # Panics
    /// If there are not as many stores as tables.
    pub async fn open(leases: &Leases<F>, lease: &Lease, stores: &[&Store]) -> Result<Stamps<F>, StampError> {
        assert_eq!(leases.tables().len(), stores.len(), "each member has a table and a description");
        let nodes = leases.tables().iter().map(|table| table.get().node);
        let members: Vec<(NodeId, &Store)> = nodes.zip(stores.iter().copied()).collect();
        Stamps::open_at(leases, lease, &members).await
    }

    /// Does the same as [`Stamps::open`] for a store of which only the first members have tables of leases. `members`
    /// has the node and the description of each member.
    ///
    /// # Errors
    /// Those of [`Stamps::open`].
    ///
    /// # Panics
    /// If there are fewer members than tables.
    pub async fn open_at(
        leases: &Leases<F>,
        lease: &Lease,
        members: &[(NodeId, &Store)],
    ) -> Result<Stamps<F>, StampError> {
        assert!(leases.tables().len() <= members.len(), "each table is that of a member");
        let fabric = leases.fabric().clone();
        let member = |(node, store): &(NodeId, &Store)| Member {
            node: *node,
            store: (*store).clone(),
            shown: Cell::default(),
        };
        let clocks = Cell::new((fabric.now(), fabric.wall()));
        let stamps = Stamps {
            members: members.iter().map(member).collect(),
            tables: Rc::clone(leases.tables()),
            fabric,
            id: lease.id(),
            last: Cell::new(0),
            reserved: Cell::new(0),
            clocks,
            jumps: Cell::new(0),
        };
        let reserved = stamps.reservation().await?;
        if !mutants::RESERVATION_FORGOTTEN.is_on() {
            stamps.last.set(reserved);
        }
        for member in &stamps.members {
            stamps.look(member, true).await?;
        }
        Ok(stamps)
    }
}

impl<F: Fabric + Clock> Stamps<F> {
    /// Returns the next stamp, which is higher than all stamps of this id before. Waits for the members' memory, about
    /// once in 100 ms, and never for their processes.
    ///
    /// # Errors
    /// [`StampError`]; the operation must not begin.
    pub async fn next(&self) -> Result<u64, StampError> {
        self.next_above(0).await
    }

    /// Returns the next stamp, which is also higher than `floor`.
    ///
    /// # Errors
    /// Those of [`Stamps::next`]. `floor` may be too far ahead of a member's clock.
    pub async fn next_above(&self, floor: u64) -> Result<u64, StampError> {
        loop {
            let own = self.time();
            let least = own.max(floor.saturating_add(1));
            let stamp = match mutants::STAMPS_FOLLOW_THE_CLOCK.is_on() {
                true => least,
                false => least.max(self.last.get().saturating_add(1)),
            };
            let limit = self.limit(stamp, own)?;
            if stamp < self.reserved.get() {
                self.last.set(stamp);
                return Ok(stamp);
            }
            let horizon = stamp.saturating_add(micros(HORIZON)).min(limit);
            // Other tasks may take stamps in the meantime, so that this one is no longer the next.
            self.reserve(horizon.saturating_add(1)).await?;
        }
    }

    /// Asks the members for their clocks, again and again. Runs as a task of the client, and never returns. A member
    /// that does not answer keeps the clock that it has shown last.
    pub async fn keep(&self) {
        loop {
            self.fabric.sleep(ASK_EVERY).await;
            for member in &self.members {
                let _as_shown_last = self.look(member, false).await;
            }
        }
    }

    /// Number of jumps of this client's wall clock that were noticed.
    pub fn jumps(&self) -> u64 {
        self.jumps.get()
    }

    /// Time by this client's wall clock, in microseconds since the store's creation. Notices if the clock has jumped.
    pub(crate) fn time(&self) -> u64 {
        let (now, wall) = (self.fabric.now(), self.fabric.wall());
        let (then, wall_then) = self.clocks.get();
        let expected = wall_then.saturating_add(now.saturating_sub(then));
        if wall.abs_diff(expected) >= JUMP_MIN {
            self.jumps.set(self.jumps.get() + 1);
        }
        self.clocks.set((now, wall));
        micros(wall).saturating_sub(self.created())
    }

    /// Time of the store's creation, in microseconds since the Unix epoch.
    fn created(&self) -> u64 {
        self.members[0].store.created
    }

    /// The highest stamp that no member's clock refuses.
    ///
    /// # Errors
    /// `stamp` is higher.
    fn limit(&self, stamp: u64, own: u64) -> Result<u64, StampError> {
        let mut limit = u64::MAX;
        for member in &self.members {
            let shown = member.shown.get();
            let passed = self.fabric.now().saturating_sub(shown.at);
            let theirs = shown.time.saturating_add(micros(passed));
            let highest = theirs.saturating_add(micros(AHEAD_MAX));
            if stamp > highest && !mutants::AHEAD_ACCEPTED.is_on() {
                return Err(StampError::Ahead { node: member.node, stamp, own, theirs });
            }
            limit = limit.min(highest);
        }
        // With the mutant, the stamp itself may be higher.
        Ok(limit.max(stamp))
    }

    /// Asks a member for its clock.
    ///
    /// # Errors
    /// The member does not answer.
    async fn look(&self, member: &Member, is_first: bool) -> Result<(), FabricError> {
        let node = member.node;
        let question = Ask::Wall { name: member.store.name.clone(), id: member.store.id };
        let mut fastest: Option<Duration> = None;
        for _ in 0..ATTEMPTS {
            let asked = self.fabric.now();
            let answer = ask::ask(&self.fabric, node, &question).await?;
            let at = self.fabric.now();
            let Some(Answer::Wall(since_its_creation)) = answer else {
                return Err(ask::not_understood(node, Ran::No));
            };
            let took = at.saturating_sub(asked);
            let counts = took <= ASK_MAX || is_first;
            if counts && fastest.is_none_or(|fastest| took < fastest) {
                fastest = Some(took);
                // The members' times of creation differ a little: the first one's counts.
                let time = since_its_creation.saturating_add(member.store.created);
                let time = time.saturating_sub(self.created()).saturating_add(micros(took / 2));
                member.shown.set(Shown { time, at });
            }
            if took <= ASK_MAX {
                break;
            }
        }
        Ok(())
    }

    /// Raises the reservation at a majority of the members.
    ///
    /// # Errors
    /// [`LeaseError`]: a majority may not have it.
    async fn reserve(&self, until: u64) -> Result<(), LeaseError> {
        let ask = |member: usize| self.tables.get(member).map(|table| self.raise_at(table.get(), until));
        let mut asked = [pin!(ask(0)), pin!(ask(1)), pin!(ask(2)), pin!(ask(3)), pin!(ask(4))];
        let asked = asked.each_mut().map(|asked| asked.as_mut());
        quorum(self.majority(), asked).await.map_err(first_error)?;
        self.reserved.set(self.reserved.get().max(until));
        Ok(())
    }

    /// Reads the highest reservation that a majority of the members has.
    async fn reservation(&self) -> Result<u64, LeaseError> {
        let ask = |member: usize| self.tables.get(member).map(|table| self.read_at(table.get()));
        let mut asked = [pin!(ask(0)), pin!(ask(1)), pin!(ask(2)), pin!(ask(3)), pin!(ask(4))];
        let asked = asked.each_mut().map(|asked| asked.as_mut());
        let read = quorum(self.majority(), asked).await.map_err(first_error)?;
        Ok(read.into_iter().flatten().flatten().max().expect("a majority has answered"))
    }

    fn majority(&self) -> usize {
        self.tables.len() / 2 + 1
    }

    async fn read_at(&self, table: Table) -> Result<u64, LeaseError> {
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(table.key);
        let reservation = chain.also(read_as::<U64>(table.reservation(self.id)));
        self.fabric.run(table.node, &chain, &mut reply).await?;
        reply.get(reservation).map(|word| word.get()).map_err(LeaseError::Refused)
    }

    async fn raise_at(&self, table: Table, until: u64) -> Result<(), LeaseError> {
        let at = table.reservation(self.id);
        table.raise(&self.fabric, at, self.reserved.get(), until).await
    }
}

fn first_error<T>(outcomes: [Option<Result<T, LeaseError>>; MEMBERS_MAX]) -> LeaseError {
    outcomes.into_iter().flatten().find_map(Result::err).expect("a quorum is missed by errors")
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
