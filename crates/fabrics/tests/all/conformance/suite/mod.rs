//! The suite: a list of claims, run on each fabric under each executor.

mod chains;
pub(crate) mod claims;
pub(crate) mod executors;
pub(crate) mod rig;
mod twin;

/// A test for each claim about the fabric of `$rig`, under our executor and under tokio's.
macro_rules! conformance {
    ($fabric:ident, $($rig:tt)+) => {
        mod $fabric {
            mod core {
                every_claim!(Core, $($rig)+);
            }
            mod tokio {
                every_claim!(Tokio, $($rig)+);
            }
        }
    };
}

macro_rules! every_claim {
    ($executor:ident, $($rig:tt)+) => {
        claims! {
            $executor, [$($rig)+];
            every_op_does_what_run_says
            the_rest_of_a_chain_depends_on_the_op_before
            a_chain_has_at_most_64_ops_and_all_of_them_run
            what_does_not_fit_a_reply_is_too_long_and_nothing_else_suffers
            a_payload_of_60_kib_arrives_whole
            a_chain_that_finds_no_buffer_runs_nothing
            another_key_opens_nothing
            another_node_is_no_node
            scratch_is_private_to_a_chain_and_zero_at_its_start
            a_dropped_run_does_no_harm
            what_a_dropped_chain_held_and_did_not_show_comes_back
            what_is_not_live_is_not_retired
            what_a_chain_makes_unreachable_comes_back
            sixty_four_tasks_run_at_once
            additions_by_many_threads_sum_up
            sixteen_bytes_never_tear
            a_call_that_cannot_be_served_is_refused
            a_stores_service_is_in_one_call_at_a_time
            a_stores_service_answers_the_stores_own_key_alone
            a_call_that_is_not_answered_ends_at_its_deadline
            a_request_after_an_idle_second_is_answered_and_the_second_costs_little
        }
    };
}

macro_rules! claims {
    ($executor:ident, $rig:tt; $($claim:ident)*) => {
        $(
            #[test]
            fn $claim() {
                use $crate::conformance::suite::{claims, executors::Executor};
                claims::$claim(&started!($rig), Executor::$executor);
            }
        )*
    };
}

macro_rules! started {
    ([$($rig:tt)+]) => {{
        #[allow(unused_imports, reason = "some rigs take others")]
        use $crate::conformance::suite::rig::*;
        <$($rig)+ as Rig>::start()
    }};
}
