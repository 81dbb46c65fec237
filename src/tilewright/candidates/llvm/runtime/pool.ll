; The threads of generated kernels: helpers that take part in a caller's work, and are never waited for unless they do.
;
; A caller posts its job to helpers that are idle, does tasks itself until none is left, and takes the job back from helpers that
; have not begun. So it waits for tasks in progress alone, and is as fast as one thread where no helper finds a core.
;
; A helper's word is 0 while it is idle, a job + POSTED until it has begun, and a job + BEGUN until it has ended. Whoever waits
; pauses for SPIN_NS, then yields its core for as long as nobody else wants it, and then sleeps. Where somebody else does, the
; processor is called disturbed for DISTURBED_NS, and all sleep after SPIN_NS.
;
; Waiting long for a helper that lost its core is a loss: half the helpers are left out for `hold`, which doubles from loss to loss.

%helper = type { i64, [56 x i8], i32, [60 x i8] } ; word; asleep
; A job: its function; the arguments; helpers that began; 1 once they may go on; helpers that ended
%job = type { ptr, ptr, i32, i32, [40 x i8], i32, [60 x i8] }

@helpers = internal global [$MOST x %helper] zeroinitializer, align 128
@created = internal global i32 0
@creating = internal global i32 0
@usable = internal global i64 1 ; threads of a caller that does not say how many
@patience = internal global i64 0 ; ns of yielding
@key = internal global i32 0 ; of the number of threads that a calling thread may use; 0 if it does not say
@disturbed = internal global i64 0 ; until this time, in ns
@limit = internal global i64 $MOST ; helpers of a caller
@gather = internal global i64 0 ; ns to wait until helpers have begun
@hold = internal global i64 0
@resume = internal global i64 0 ; when the limit may rise

declare i32 @clock_gettime(i32, ptr)
declare i32 @sched_yield()
declare i64 @syscall(i64, ...)
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_detach(i64)
declare i32 @pthread_sigmask(i32, ptr, ptr)
declare i32 @sigfillset(ptr)
declare i32 @pthread_key_create(ptr, ptr)
declare ptr @pthread_getspecific(i32)
declare i32 @pthread_setspecific(i32, ptr)
$DECLARE_PAUSE
declare i64 @llvm.umin.i64(i64, i64)
declare i64 @llvm.umax.i64(i64, i64)

define internal i64 @now() nounwind {
  %time = alloca [2 x i64], align 8
  call i32 @clock_gettime(i32 1, ptr %time)
  %s = load i64, ptr %time, align 8
  %rest = getelementptr i8, ptr %time, i64 8
  %ns = load i64, ptr %rest, align 8
  %whole = mul i64 %s, 1000000000
  %all = add i64 %whole, %ns
  ret i64 %all
}

; -- waiting

; Whether the word, masked, has become equal to the value, or different from it, before it is better to sleep.
define internal i1 @spin(ptr %word, i32 %mask, i32 %value, i1 %equal) nounwind {
entry:
  %start = call i64 @now()
  br label %look
look:
  %before = phi i64 [ %start, %entry ], [ %time, %pause ], [ %time, %yield ]
  %found = load atomic i32, ptr %word acquire, align 4
  %masked = and i32 %found, %mask
  %same = icmp eq i32 %masked, %value
  %met = icmp eq i1 %same, %equal
  br i1 %met, label %done, label %clock
clock:
  %time = call i64 @now()
  %away = sub i64 %time, %before
  %lost = icmp sgt i64 %away, $GAP_NS
  br i1 %lost, label %disturb, label %how
disturb:
  %until = add i64 %time, $DISTURBED_NS
  store atomic i64 %until, ptr @disturbed monotonic, align 8
  br label %done
how:
  %waited = sub i64 %time, %start
  %short = icmp slt i64 %waited, $SPIN_NS
  br i1 %short, label %pause, label %long
pause:
  $PAUSE
  $PAUSE
  $PAUSE
  $PAUSE
  br label %look
long:
  %noise = load atomic i64, ptr @disturbed monotonic, align 8
  %patience = load i64, ptr @patience, align 8
  %quiet = icmp slt i64 %noise, %time
  %patient = icmp slt i64 %waited, %patience
  %stay = and i1 %quiet, %patient
  br i1 %stay, label %yield, label %done
yield:
  call i32 @sched_yield()
  br label %look
done:
  ret i1 %met
}

; Wait until the word, but for its highest bit, is the target.
define internal void @await(ptr %word, i32 %target) nounwind {
entry:
  %met = call i1 @spin(ptr %word, i32 2147483647, i32 %target, i1 true)
  br i1 %met, label %done, label %again
again:
  %found = load atomic i32, ptr %word acquire, align 4
  %count = and i32 %found, 2147483647
  %now = icmp eq i32 %count, %target
  br i1 %now, label %done, label %mark
mark: ; whoever changes the word then wakes those who sleep on it
  %marked = or i32 %found, -2147483648
  %tried = cmpxchg ptr %word, i32 %found, i32 %marked seq_cst seq_cst
  %set = extractvalue { i32, i1 } %tried, 1
  br i1 %set, label %sleep, label %again
sleep:
  call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %word, i32 128, i32 %marked, ptr null)
  br label %again
done:
  ret void
}

; finished(word, count): add to a word that others may `await`.
define void @tilewright_finished(ptr %word, i32 %count) nounwind {
  %before = atomicrmw add ptr %word, i32 %count seq_cst
  %awaited = icmp slt i32 %before, 0
  br i1 %awaited, label %wake, label %done
wake:
  call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %word, i32 129, i32 2147483647)
  br label %done
done:
  ret void
}

; meet(word, target): wait until all tasks that come first are done.
define void @tilewright_meet(ptr %word, i32 %target) nounwind {
entry:
  %found = load atomic i32, ptr %word acquire, align 4
  %count = and i32 %found, 2147483647
  %met = icmp eq i32 %count, %target
  br i1 %met, label %done, label %wait
wait:
  %start = call i64 @now()
  call void @await(ptr %word, i32 %target)
  %end = call i64 @now()
  %waited = sub i64 %end, %start
  %lost = icmp sgt i64 %waited, $MEETING_NS
  br i1 %lost, label %loss, label %done
loss:
  call void @loss(i64 %end, i64 1)
  br label %done
done:
  ret void
}

; -- how many take part

; Half as many helpers as these from now on, for twice as long as after the last loss, if that was lately.
define internal void @loss(i64 %time, i64 %helpers) nounwind {
  %hold = load atomic i64, ptr @hold monotonic, align 8
  %resume = load atomic i64, ptr @resume monotonic, align 8
  %since = sub i64 %time, %resume
  %lately = icmp slt i64 %since, %hold
  %twice = shl i64 %hold, 1
  %longer = call i64 @llvm.umax.i64(i64 %twice, i64 $HOLD_NS)
  %most = call i64 @llvm.umin.i64(i64 %longer, i64 $LONGEST_HOLD_NS)
  %next = select i1 %lately, i64 %most, i64 $HOLD_NS
  %until = add i64 %time, %next
  %half = lshr i64 %helpers, 1
  store atomic i64 %next, ptr @hold monotonic, align 8
  store atomic i64 %until, ptr @resume monotonic, align 8
  store atomic i64 %half, ptr @limit monotonic, align 8
  ret void
}

; The helpers that a caller may have of those it wants.
define internal i64 @allowed(i64 %wanted) nounwind {
entry:
  %limit = load atomic i64, ptr @limit monotonic, align 8
  %within = icmp uge i64 %limit, %wanted
  %gather = load i64, ptr @gather, align 8
  %gathers = icmp ne i64 %gather, 0
  %enough = or i1 %within, %gathers
  br i1 %enough, label %all, label %few
all:
  ret i64 %wanted
few:
  %time = call i64 @now()
  %resume = load atomic i64, ptr @resume monotonic, align 8
  %over = icmp sge i64 %time, %resume
  br i1 %over, label %raise, label %limited
limited:
  ret i64 %limit
raise:
  %twice = shl i64 %limit, 1
  %higher = add i64 %twice, 1
  %hold = load atomic i64, ptr @hold monotonic, align 8
  %later = add i64 %time, %hold
  store atomic i64 %later, ptr @resume monotonic, align 8
  store atomic i64 %higher, ptr @limit monotonic, align 8
  %given = call i64 @llvm.umin.i64(i64 %higher, i64 %wanted)
  ret i64 %given
}

; team(count): the threads that the calling thread may use where torch may use so many.
define i64 @tilewright_team(i64 %count) nounwind {
  %key = load i32, ptr @key, align 4
  %value = call ptr @pthread_getspecific(i32 %key)
  %said = ptrtoint ptr %value to i64
  %usable = load i64, ptr @usable, align 8
  %least = call i64 @llvm.umin.i64(i64 %count, i64 %usable)
  %says = icmp ne i64 %said, 0
  %team = select i1 %says, i64 %said, i64 %least
  ret i64 %team
}

; -- helpers

define internal ptr @help(ptr %self) nounwind {
entry:
  %asleep = getelementptr %helper, ptr %self, i64 0, i32 2
  br label %idle
idle:
  %near = call i1 @spin(ptr %self, i32 -1, i32 0, i1 false)
  br i1 %near, label %take, label %drowse
drowse:
  store atomic i32 1, ptr %asleep seq_cst, align 4
  %waiting = load atomic i64, ptr %self seq_cst, align 8
  %none = icmp eq i64 %waiting, 0
  br i1 %none, label %sleep, label %awake
sleep:
  call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %asleep, i32 128, i32 1, ptr null)
  %still = load atomic i32, ptr %asleep seq_cst, align 4
  %again = icmp eq i32 %still, 1
  br i1 %again, label %drowse, label %take
awake:
  store atomic i32 0, ptr %asleep seq_cst, align 4
  br label %take
take:
  %posted = load atomic i64, ptr %self acquire, align 8
  %gone = icmp eq i64 %posted, 0
  br i1 %gone, label %idle, label %begin
begin:
  %begun = add i64 %posted, 1
  %tried = cmpxchg ptr %self, i64 %posted, i64 %begun seq_cst seq_cst
  %mine = extractvalue { i64, i1 } %tried, 1
  br i1 %mine, label %work, label %idle
work:
  %address = sub i64 %posted, $POSTED
  %job = inttoptr i64 %address to ptr
  %function = load ptr, ptr %job, align 8
  %place = getelementptr %job, ptr %job, i64 0, i32 1
  %arguments = load ptr, ptr %place, align 8
  %joined = getelementptr %job, ptr %job, i64 0, i32 2
  %before = atomicrmw add ptr %joined, i32 1 monotonic
  %others = zext i32 %before to i64
  %number = add i64 %others, 1
  %go = getelementptr %job, ptr %job, i64 0, i32 3
  br label %ready
ready:
  %may = load atomic i32, ptr %go acquire, align 4
  %goes = icmp ne i32 %may, 0
  br i1 %goes, label %run, label %gather
gather:
  $PAUSE
  br label %ready
run:
  call void %function(ptr %arguments, i64 %number)
  store atomic i64 0, ptr %self release, align 8
  %ended = getelementptr %job, ptr %job, i64 0, i32 5
  call void @tilewright_finished(ptr %ended, i32 1)
  br label %idle
}

; Start helpers until there are so many, unless another thread does. They leave signals to the program's own threads.
define internal void @create(i32 %wanted) nounwind {
entry:
  %thread = alloca i64, align 8
  %all = alloca [128 x i8], align 8
  %kept = alloca [128 x i8], align 8
  %busy = atomicrmw xchg ptr @creating, i32 1 acquire
  %free = icmp eq i32 %busy, 0
  br i1 %free, label %mask, label %done
mask:
  call i32 @sigfillset(ptr %all)
  call i32 @pthread_sigmask(i32 2, ptr %all, ptr %kept)
  br label %next
next:
  %count = load atomic i32, ptr @created monotonic, align 4
  %missing = icmp ult i32 %count, %wanted
  br i1 %missing, label %start, label %unmask
start:
  %index = zext i32 %count to i64
  %self = getelementptr %helper, ptr @helpers, i64 %index
  %failed = call i32 @pthread_create(ptr %thread, ptr null, ptr @help, ptr %self)
  %running = icmp eq i32 %failed, 0
  br i1 %running, label %started, label %unmask
started:
  %handle = load i64, ptr %thread, align 8
  call i32 @pthread_detach(i64 %handle)
  %more = add i32 %count, 1
  store atomic i32 %more, ptr @created release, align 4
  br label %next
unmask:
  call i32 @pthread_sigmask(i32 2, ptr %kept, ptr null)
  store atomic i32 0, ptr @creating release, align 4
  br label %done
done:
  ret void
}

; -- callers

; parallel(function, arguments, threads): function(arguments, number) on the calling thread, whose number is 0, and on as many
; others below `threads` as are at hand. The function takes its tasks from a counter.
define void @tilewright_parallel(ptr %function, ptr %arguments, i64 %threads) nounwind {
entry:
  %job = alloca %job, align 128
  %chosen = alloca [$MOST x ptr], align 8
  %others = sub i64 %threads, 1
  %most = call i64 @llvm.umin.i64(i64 %others, i64 $MOST)
  %wanted = call i64 @allowed(i64 %most)
  %alone = icmp eq i64 %wanted, 0
  br i1 %alone, label %single, label %several
single:
  call void %function(ptr %arguments, i64 0)
  ret void
several:
  %start = call i64 @now()
  store ptr %function, ptr %job, align 8
  %place = getelementptr %job, ptr %job, i64 0, i32 1
  store ptr %arguments, ptr %place, align 8
  %joined = getelementptr %job, ptr %job, i64 0, i32 2
  store i32 0, ptr %joined, align 4
  %go.at = getelementptr %job, ptr %job, i64 0, i32 3
  %gathering = load i64, ptr @gather, align 8
  %at.once = icmp eq i64 %gathering, 0
  %going = zext i1 %at.once to i32
  store i32 %going, ptr %go.at, align 4
  %ended = getelementptr %job, ptr %job, i64 0, i32 5
  store i32 0, ptr %ended, align 4
  %address = ptrtoint ptr %job to i64
  %word = add i64 %address, $POSTED
  %here = load atomic i32, ptr @created acquire, align 4
  %count = zext i32 %here to i64
  %enough = icmp uge i64 %count, %wanted
  br i1 %enough, label %post, label %create
create:
  %narrow = trunc i64 %wanted to i32
  call void @create(i32 %narrow)
  br label %post

post:
  %i = phi i64 [ 0, %several ], [ 0, %create ], [ %i.next, %posted ]
  %sent = phi i64 [ 0, %several ], [ 0, %create ], [ %sent.next, %posted ]
  %known = load atomic i32, ptr @created acquire, align 4
  %last = zext i32 %known to i64
  %left = icmp ult i64 %i, %last
  %short = icmp ult i64 %sent, %wanted
  %go = and i1 %left, %short
  br i1 %go, label %offer, label %gather
offer:
  %helper = getelementptr %helper, ptr @helpers, i64 %i
  %offered = cmpxchg ptr %helper, i64 0, i64 %word seq_cst seq_cst
  %taken = extractvalue { i64, i1 } %offered, 1
  br i1 %taken, label %note, label %posted
note:
  %slot = getelementptr ptr, ptr %chosen, i64 %sent
  store ptr %helper, ptr %slot, align 8
  %asleep = getelementptr %helper, ptr %helper, i64 0, i32 2
  %sleeps = load atomic i32, ptr %asleep seq_cst, align 4
  %deaf = icmp eq i32 %sleeps, 1
  br i1 %deaf, label %wake, label %posted
wake:
  store atomic i32 0, ptr %asleep seq_cst, align 4
  call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %asleep, i32 129, i32 1)
  br label %posted
posted:
  %one = phi i64 [ 0, %offer ], [ 1, %note ], [ 1, %wake ]
  %sent.next = add i64 %sent, %one
  %i.next = add i64 %i, 1
  br label %post

gather:
  br i1 %at.once, label %work, label %present
present:
  %began = load atomic i32, ptr %joined monotonic, align 4
  %all = trunc i64 %sent to i32
  %absent = icmp ult i32 %began, %all
  %clock = call i64 @now()
  %waiting = sub i64 %clock, %start
  %early = icmp slt i64 %waiting, %gathering
  %stay = and i1 %absent, %early
  br i1 %stay, label %yield, label %work
yield:
  call i32 @sched_yield()
  br label %present

work:
  store atomic i32 1, ptr %go.at release, align 4
  call void %function(ptr %arguments, i64 0)
  br label %withdraw

withdraw: ; from helpers that have not begun
  %k = phi i64 [ 0, %work ], [ %k.next, %withdrawn ]
  %begun = phi i32 [ 0, %work ], [ %begun.next, %withdrawn ]
  %more = icmp ult i64 %k, %sent
  br i1 %more, label %withdrawn, label %join
withdrawn:
  %at = getelementptr ptr, ptr %chosen, i64 %k
  %which = load ptr, ptr %at, align 8
  %back = cmpxchg ptr %which, i64 %word, i64 0 seq_cst seq_cst
  %idle = extractvalue { i64, i1 } %back, 1
  %busy = xor i1 %idle, true
  %busy.one = zext i1 %busy to i32
  %begun.next = add i32 %begun, %busy.one
  %k.next = add i64 %k, 1
  br label %withdraw

join:
  %seen = load atomic i32, ptr %ended acquire, align 4
  %complete = icmp eq i32 %seen, %begun
  br i1 %complete, label %done, label %wait
wait:
  %from = call i64 @now()
  call void @await(ptr %ended, i32 %begun)
  %to = call i64 @now()
  %waited = sub i64 %to, %from
  %took = sub i64 %to, %start
  %long = icmp sgt i64 %waited, $WAIT_NS
  %thrice = mul i64 %waited, 3
  %twice = shl i64 %took, 1
  %most.of = icmp sgt i64 %thrice, %twice
  %lost = and i1 %long, %most.of
  br i1 %lost, label %loss, label %done
loss:
  call void @loss(i64 %to, i64 %sent)
  br label %done
done:
  ret void
}

; -- for Python

; setup(usable, patience): once a process.
define void @tilewright_setup(i64 %usable, i64 %patience) nounwind {
  store i64 %usable, ptr @usable, align 8
  store i64 %patience, ptr @patience, align 8
  call i32 @pthread_key_create(ptr @key, ptr null)
  ret void
}

; say(count, gather): the threads that the calling thread may use, 0 leaves it to torch and the machine; and how many ns callers
; wait for all of them before they begin, which shows races.
define void @tilewright_say(i64 %count, i64 %gather) nounwind {
  %key = load i32, ptr @key, align 4
  %value = inttoptr i64 %count to ptr
  call i32 @pthread_setspecific(i32 %key, ptr %value)
  store i64 %gather, ptr @gather, align 8
  ret void
}

; crowded(): 1 after a loss, for as long as helpers are left out and tried again.
define i64 @tilewright_crowded() nounwind {
  %time = call i64 @now()
  %hold = load atomic i64, ptr @hold monotonic, align 8
  %resume = load atomic i64, ptr @resume monotonic, align 8
  %end = add i64 %resume, %hold
  %before = icmp slt i64 %time, %end
  %crowded = zext i1 %before to i64
  ret i64 %crowded
}

; forked(): a child has no helpers.
define void @tilewright_forked() nounwind {
entry:
  br label %next
next:
  %i = phi i64 [ 0, %entry ], [ %i.next, %next ]
  %helper = getelementptr %helper, ptr @helpers, i64 %i
  store i64 0, ptr %helper, align 8
  %asleep = getelementptr %helper, ptr %helper, i64 0, i32 2
  store i32 0, ptr %asleep, align 4
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, $MOST
  br i1 %more, label %next, label %done
done:
  store atomic i32 0, ptr @created monotonic, align 4
  store atomic i32 0, ptr @creating monotonic, align 4
  store atomic i64 $MOST, ptr @limit monotonic, align 8
  store atomic i64 0, ptr @disturbed monotonic, align 8
  ret void
}
