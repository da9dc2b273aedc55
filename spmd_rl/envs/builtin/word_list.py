"""Common English words of five letters, for `wordle`."""

FIVE_LETTERS = """
about above actor adult after again agree ahead alarm album alert alike alive allow alone along among anger angle angry
apart apple apply april arena argue arise aside audio avoid award aware badly baker basic beach began begin being below
bench birth black blame blank blind block blood board boost brain brand bread break brick brief bring broad brown brush
build cabin cable carry catch cause chain chair chalk charm chart cheap check chest chief child civil claim class clean
clear clerk climb clock close cloth cloud coach coast could count court cover craft crash cream crime cross crowd crown
curve cycle daily dance death depth diary dirty doubt dozen draft drama dream dress drink drive eager early earth eight
empty enemy enjoy enter entry equal error event every exact exist extra faith false fault field fifth fight final first
flame flash fleet floor fluid focus force forty found frame fresh front fruit funny ghost giant given glass globe glove
grace grade grain grand grant grass great green gross group guard guess guest guide habit happy heart heavy hello honey
horse hotel house human humor image index inner input issue ivory jelly joint judge juice knife knock known label large
laugh layer learn least leave lemon level light limit local logic loose lucky lunch magic major maker march match maybe
mayor media metal minor model money month moral motor mount mouse mouth movie music nerve never night noise north novel
nurse ocean offer often olive onion order other ought outer owner paint panel paper party peace phone photo piano piece
pilot pitch place plain plane plant plate point power press price pride prime print prize proof proud queen quick quiet
radio raise range rapid reach ready river robin rough round route royal rural salad scale scene scope score sense serve
seven shade shape share sharp sheep sheet shelf shirt shock shore short skill sleep slice slope small smart smile smoke
snake solid solve sound south space speak speed spend sport stage stair stand start state steam steel stick stone store
storm story sugar sweet table teach thank theme thick thing think third throw tiger title toast topic touch tower track
trade train treat trial truck trust truth uncle under union until upper urban usual value video visit vital voice waste
watch water wheel where which while white whole woman world worry worth would write wrong yield young youth zebra
"""
