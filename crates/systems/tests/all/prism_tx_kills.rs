//! Clients of PRISM-TX that are killed while they commit transactions in shared memory.
//!
//! The tests check, besides what [`strikes`](crate::support::strikes) says, that after each death:
//! * the sum of the bank's accounts is that of the beginning, in every transaction,
//! * every acknowledged transfer is there, and the one in progress is there as a whole or not at all,
//! * healing leaves no unsettled key and no open log entry.

use crate::support::bank::{self, ACCOUNTS, Bank, OPENING, table_of};
use crate::support::deadly_bank::Phase;
use crate::support::deadly_table::{Purpose, Strike, Table};
use crate::support::process::Role;
use crate::support::strikes::{Struck, killed_at_accesses};
use farside_fabrics::direct::Direct;
use farside_fabrics::memory::Mapping;
use farside_remote::control::Store;
use farside_systems::txn::prism_tx::service::PrismTxKind;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn clients_of_a_bank_killed_in_any_phase_lose_nothing() {
    killed_at_accesses::<Banks>(Phase::ALL.len());
}

#[test]
#[ignore = "kills 200 processes: for the soak"]
fn soak_200_clients_of_a_bank_killed_in_any_phase_lose_nothing() {
    killed_at_accesses::<Banks>(200);
}

struct Banks;

impl Struck for Banks {
    type System = PrismTxKind;
    type Phase = Phase;
    type Client = Bank<Arc<Mapping>>;

    const TEST: &'static str = "clients_of_a_bank_killed";
    const LEASE: Duration = bank::LEASE;

    fn parameters() -> String {
        bank::parameters()
    }

    /// Gives the accounts their first amounts.
    fn found(store: &Store, client: impl FnOnce() -> Self::Client) -> Table {
        let mut founder = client();
        founder.found();
        founder.leave();
        table_of(store)
    }

    fn open(endpoint: Rc<Direct>, name: &str, entropy: u64) -> Self::Client {
        Bank::open(endpoint, name, entropy)
    }

    fn victim(
        socket: PathBuf,
        store: String,
        table: Table,
        entropy: u64,
        strike: Option<Strike<Phase>>,
    ) -> Role {
        Role::BankClient { socket, store, table, entropy, strike }
    }

    /// Moves money between the same accounts.
    fn go_on(client: &mut Self::Client, _round: u64) -> Duration {
        let before = Instant::now();
        assert_eq!(client.transfer_and_add(), ACCOUNTS * OPENING);
        let took = before.elapsed();
        client.run(async |_| std::thread::sleep(Duration::from_micros(200)));
        took
    }

    fn check(client: &mut Self::Client, done: u64) {
        let (sum, count) = client.write_all();
        assert_eq!(sum, ACCOUNTS * OPENING);
        assert!((done..=done + 1).contains(&count), "{done} transfers were acknowledged, {count} are there");
    }

    fn check_healed(client: Self::Client, _rounds: u64) {
        let stat = client.leave_with_stat();
        assert_eq!((stat.unsettled, stat.open), (0, 0), "{stat:?}");
        assert_eq!(stat.values, ACCOUNTS + 1, "{stat:?}");
    }

    fn leave(client: Self::Client) {
        client.leave();
    }
}
